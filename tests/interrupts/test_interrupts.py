"""Ctrl-C may come at any moment of a blocking call: no key is left behind, and the lock object stays of use.

Every interrupt here is a real SIGINT. Most come from another process, at random moments of a few hundred microseconds;
one test makes sure of every moment, by having the signal arrive after each single bytecode of the library in turn.
"""

from __future__ import annotations

import random
import signal
import time

import pytest
import redis

from tests.proxy import Proxy, delay
from tests.servers import Server
from tests.support import Script, eventually, lock_keys

# Python may raise at the call of __exit__, before its first instruction; no context manager written in Python can cover
# that. Then the object still has the lease.
KNOWN_GAP = """
import traceback

def is_known_gap(struck):
    *_, (last, line) = traceback.walk_tb(struck.__traceback__)
    return last.f_code.co_name == "__exit__" and line == last.f_code.co_firstlineno
"""

# A tormentor is a forked process that reads delays in seconds and answers each, that much later, with a SIGINT.
TORMENTED = """
import gc, random, struct, warnings
# Interrupted between making a socket and noting it, redis-py leaves closing it to the garbage collector.
warnings.simplefilter("ignore", ResourceWarning)
asked, ask = os.pipe()
victim = os.getpid()
if os.fork() == 0:
    os.close(ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while order := os.read(asked, 8):
        due = time.perf_counter() + struct.unpack("d", order)[0]
        while time.perf_counter() < due:
            pass
        os.kill(victim, signal.SIGINT)
    os._exit(0)
os.close(asked)
dice = random.Random(int(sys.argv[2]))
admin = redis.Redis.from_url(url)

def is_free(name, patience=3.0):
    deadline = time.monotonic() + patience
    while admin.exists(name):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True

def torment(longest):
    os.write(ask, struct.pack("d", dice.uniform(0, longest)))
"""


def run_tormented(code: str, url: str, *arguments: object) -> str:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with Script(TORMENTED + code, url, seed, *arguments) as script:
        # An interrupt that Python meets in a weak reference's callback is printed and forgotten; so much for stderr.
        return script.finish(100.0, quiet=False)


def test_two_hundred_interrupts_of_acquire_and_release_leave_nothing(server: Server, admin: redis.Redis) -> None:
    code = """
client = holdfast.connect(url)
lock = client.lock("x")
interrupted = 0
for number in range(200):
    lease = None
    try:
        torment(0.0006)
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            lease = lock.acquire()
            lease.release()
    except KeyboardInterrupt:
        interrupted += 1
    # It may have come after acquire and before release had begun; then the lease is in our hands.
    if lease is not None and lease.held:
        lease.release()
    if not is_free("x"):
        say("an orphan after interrupt", number)
        break
# The object must not stay locked for ever either, nor the client be of no more use.
lease = lock.acquire(timeout=5)
say(interrupted > 190, bool(lease))
lease.release()
client.close()
gc.collect()
def left():
    # Connections since the test began, but for the one that looks.
    return sum(int(found["id"]) > int(sys.argv[3]) for found in admin.client_list()) - 1
until = time.monotonic() + 5
while left() and time.monotonic() < until:
    time.sleep(0.01)
say(left())
"""
    assert run_tormented(code, server.url, admin.client_id()) == "True True\n0\n"


def test_interrupts_of_a_with_block_leave_no_key(server: Server) -> None:
    code = """
client = holdfast.connect(url)
interrupted = 0
for number in range(150):
    lock = client.lock("x")
    try:
        torment(0.0006)
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            with lock:
                pass
    except KeyboardInterrupt as struck:
        interrupted += 1
        if is_known_gap(struck):
            lock.release()
    if not is_free("x"):
        say("an orphan after interrupt", number)
        break
say(interrupted > 140)
client.close()
"""
    assert run_tormented(KNOWN_GAP + code, server.url) == "True\n"


def test_interrupts_while_waiting_for_another_holder_leave_its_key_alone(server: Server, admin: redis.Redis) -> None:
    code = """
client, other = holdfast.connect(url), holdfast.connect(url)
held = other.lock("x").acquire()
token = held.token.encode()
lock = client.lock("x")
interrupted = 0
for number in range(60):
    try:
        torment(0.02)
        lock.acquire(timeout=10)
    except KeyboardInterrupt:
        interrupted += 1
    if admin.get("x") != token:
        say("the holder's key was touched")
held.release()
lease = lock.acquire(timeout=5)
say(interrupted > 50, bool(lease))
lease.release()
say(is_free("x"))
client.close()
other.close()
"""
    assert run_tormented(code, server.url) == "True True\nTrue\n"


def test_interrupts_at_first_contact_leave_no_key_and_a_working_keeper(server: Server) -> None:
    code = """
import threading
interrupted = 0
for number in range(60):
    client = holdfast.connect(url)
    lock = client.lock("x")
    lease = None
    try:
        torment(0.003)
        lease = lock.acquire()
        time.sleep(5)
    except KeyboardInterrupt:
        interrupted += 1
    if lease is not None and lease.held:
        lease.release()
    if not is_free("x"):
        say("an orphan after interrupt", number)
        break
    lease = lock.acquire(timeout=5)
    if not any(thread.name == "holdfast-keeper" and thread.is_alive() for thread in threading.enumerate()):
        say("no keeper after interrupt", number)
        break
    lease.release()
    client.close()
say(interrupted > 50)
"""
    assert run_tormented(code, server.url) == "True\n"


@pytest.mark.parametrize("step", ["acquire", "release"])
def test_interrupt_while_the_reply_is_under_way(proxy: Proxy, admin: redis.Redis, step: str) -> None:
    code = """
    client = holdfast.connect(url)
    with client.lock("warm"):
        pass
    say("ready")
    sys.stdin.readline()
    try:
        with client.lock("x") as lease:
            pass
        say("not interrupted")
    except KeyboardInterrupt:
        say("interrupted")
    sys.stdin.readline()
    with client.lock("x", wait=5):
        say("held again")
    client.close()
    """
    with Script(code, proxy.url) as script:
        script.hear("ready")
        count = proxy.seen(step)
        proxy.on(step, delay(1.5))
        script.write("go\n")
        proxy.await_request(step, count + 1)
        time.sleep(0.05)
        script.send(signal.SIGINT)
        script.hear("interrupted")
        eventually(lambda: lock_keys(admin) == [], what="no key is left")
        script.write("go\n")
        script.hear("held again")
        script.finish()


def test_interrupt_on_a_hung_server_is_heeded_and_cleaned_up(server: Server, admin: redis.Redis) -> None:
    code = """
    client = holdfast.connect(url)
    with client.lock("warm"):
        pass
    say("ready")
    sys.stdin.readline()
    try:
        say("asking")
        client.lock("x").acquire()
    except KeyboardInterrupt:
        say("interrupted")
    sys.stdin.readline()
    client.close()
    """
    with Script(code, server.url) as script:
        script.hear("ready")
        server.pause()
        script.write("go\n")
        script.hear("asking")
        time.sleep(0.3)
        script.send(signal.SIGINT)
        script.hear("interrupted")
        server.resume()
        eventually(lambda: list(admin.scan_iter("x:hf1:gone:*")), what="the keeper has buried the attempt")
        assert lock_keys(admin) == []
        script.write("go\n")
        script.finish(quiet=False)  # the outage is logged


# The signal becomes pending behind the interpreter's back (a subscript, not a call, so that the tracer itself does not
# notice it), and is met wherever CPython next looks for signals, which is where a real one would be met.
MOMENTS = """
import _thread, collections, functools
admin = redis.Redis.from_url(url)
trip = collections.defaultdict(functools.partial(_thread.interrupt_main, signal.SIGINT))

class Tracer:
    def __init__(self, moment):
        self.left, self.where, self.key = moment, "", object()

    def __call__(self, frame, event, argument):
        if "/holdfast/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)  # or the next event's call of this method would be where the signal is met
                trip[self.key]
        return self

if sys.version_info >= (3, 12):  # which tells a tracer of few opcodes, or none
    import threading
    watched = [None]

    def each(code, offset, main=threading.get_ident()):
        tracer = watched[0]
        if tracer is not None and "/holdfast/" in code.co_filename and threading.get_ident() == main:
            tracer.left -= 1
            if tracer.left == 0:
                tracer.where = f"{code.co_filename}:{sys._getframe(1).f_lineno}"
                settrace(None)
                trip[tracer.key]  # and no call after it, which would be where the signal is met

    def settrace(tracer):
        watched[0] = tracer
        sys.monitoring.set_events(3, sys.monitoring.events.INSTRUCTION if tracer is not None else 0)

    sys.monitoring.use_tool_id(3, "moments")
    sys.monitoring.register_callback(3, sys.monitoring.events.INSTRUCTION, each)
    sys.settrace = settrace

def is_free(name, patience):
    deadline = time.monotonic() + patience
    while admin.exists(name):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
"""

EVERY_MOMENT = (
    MOMENTS
    + """
client = holdfast.connect(url)
lock = client.lock("x")
with lock:
    pass
moment = interrupted = 0
orphans = []
while True:
    moment += 1
    tracer, lease = Tracer(moment), None
    in_acquire = sys.argv[2] == "acquire"
    try:
        if in_acquire:
            sys.settrace(tracer)
            lease = lock.acquire(timeout=3)
            sys.settrace(None)
        else:
            lease = lock.acquire(timeout=3)
            sys.settrace(tracer)
            lease.release()
            sys.settrace(None)
        for _ in range(9):
            pass  # a place to be interrupted, if it has not been before
    except KeyboardInterrupt:
        sys.settrace(None)
        interrupted += 1
    if lease is not None and (in_acquire or lease.held):
        try:
            lease.release()
        except holdfast.HoldfastError as error:
            orphans.append(f"held, but {type(error).__name__} on release: " + tracer.where)
    if tracer.left > 0:
        break
    if not is_free("x", 1.0):
        orphans.append(tracer.where)
        admin.delete("x")
    if (again := lock.acquire(timeout=1)) is None:
        orphans.append("the object stays locked: " + tracer.where)
        lock = client.lock("x")
    else:
        again.release()
    if len(orphans) > 5:
        break
say("interrupted", interrupted > 60 and interrupted > 0.9 * (moment - 1))  # some strike where Python swallows them
for orphan in orphans:
    say(orphan.rpartition("/holdfast/")[2], "in", orphan[:40])
client.close()
"""
)


@pytest.mark.long
@pytest.mark.parametrize("step", ["acquire", "release"])
def test_interrupt_after_every_single_bytecode_leaves_no_key(server: Server, step: str) -> None:
    with Script(EVERY_MOMENT, server.url, step) as script:
        # A signal that is met in __del__ is printed and forgotten by Python; so much for stderr.
        assert script.finish(100.0, quiet=False) == "interrupted True\n"


EVERY_MOMENT_OF_A_WAIT = (
    MOMENTS
    + """
client, other = holdfast.connect(url), holdfast.connect(url)
lock = client.lock("x")
with lock:
    pass
moment = interrupted = 0
orphans = []
while len(orphans) < 5:
    moment += 1
    tracer = Tracer(moment)
    held = other.lock("x").acquire()
    try:
        sys.settrace(tracer)
        lock.acquire(timeout=0.01)
        sys.settrace(None)
        for _ in range(9):
            pass  # a place to be interrupted, if it has not been before
    except KeyboardInterrupt:
        sys.settrace(None)
        interrupted += 1
    if tracer.left <= 0 and not is_free("x:hf1:waiters:{x}", 0.6):  # the place of a waiter that has left
        orphans.append(tracer.where)
        admin.delete("x:hf1:waiters:{x}")
    held.release()
    if tracer.left > 0:
        break
say("interrupted", interrupted > 60 and interrupted > 0.9 * (moment - 1))
for orphan in orphans:
    say("queued after", orphan.rpartition("/holdfast/")[2])
client.close()
other.close()
"""
)


@pytest.mark.long
def test_interrupt_after_every_single_bytecode_of_a_wait_leaves_its_queue(server: Server) -> None:
    with Script(EVERY_MOMENT_OF_A_WAIT, server.url) as script:
        assert script.finish(200.0, quiet=False) == "interrupted True\n"


LEAVING = (
    MOMENTS
    + """
client = holdfast.connect(url)

def make():
    return {kind}

for _ in range(3):
    with make():
        pass
moment = interrupted = 0
orphans = []
while len(orphans) < 5:
    moment += 1
    tracer = Tracer(moment)
    lock = make()
    try:
        with {entered}:
            sys.settrace(tracer)
        sys.settrace(None)
        for _ in range(9):
            pass
    except KeyboardInterrupt:
        sys.settrace(None)
        interrupted += 1
    if tracer.left > 0:
        break
    while client.statistics().holds:
        orphans.append(tracer.where)
        lock.release()
    again = make().acquire(timeout=3)
    if again is None:
        orphans.append(tracer.where)
        break
    again.release()
say("interrupted", interrupted > 60 and interrupted > 0.9 * (moment - 1))
for orphan in orphans:
    say("held after", orphan.rpartition("/holdfast/")[2])
client.close()
"""
)
KINDS = {
    'client.lock("x")': "lock",
    'client.lock("x", "y")': "lock",
    'client.rlock("x")': "lock, lock",
    'client.semaphore("x", 2)': "lock, lock",
    'client.rwlock("x").read': "lock",
    'client.rwlock("x").write': "lock",
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_interrupt_after_every_single_bytecode_of_leaving_with_releases_it(server: Server, kind: str) -> None:
    with Script(LEAVING.replace("{kind}", kind).replace("{entered}", KINDS[kind]), server.url) as script:
        assert script.finish(100.0, quiet=False) == "interrupted True\n"


# The same with another thread of the process before or behind the interrupted one, so that the lease is passed on.
EVERY_MOMENT_IN_LINE = (
    MOMENTS
    + """
import threading
client = holdfast.connect(url)
with client.lock("x"):
    pass

class Other:
    def __init__(self, hold_until):
        self.has, self.done, self.hold_until = threading.Event(), threading.Event(), hold_until
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        with client.lock("x"):
            self.has.set()
            self.hold_until()
        self.done.set()

def until_in_line():
    deadline = time.monotonic() + 2
    while not client.statistics().local_queues and time.monotonic() < deadline and not over.is_set():
        time.sleep(0.0005)

moment = interrupted = passed = 0
orphans = []
over = threading.Event()
while True:
    moment += 1
    tracer, lease = Tracer(moment), None
    over.clear()
    if sys.argv[2] == "acquire":
        other = Other(until_in_line)
        other.has.wait(5)
    else:
        lock = client.lock("x", wait=3)
        lease = lock.__enter__() if sys.argv[2] == "leave" else lock.acquire(timeout=3)
        other = Other(lambda: None)
        until_in_line()
    try:
        sys.settrace(tracer)
        if sys.argv[2] == "acquire":
            lease = client.lock("x").acquire(timeout=3)
        elif sys.argv[2] == "leave":
            lock.__exit__(None, None, None)
        else:
            lease.release()
        sys.settrace(None)
        for _ in range(9):
            pass
    except KeyboardInterrupt:
        sys.settrace(None)
        interrupted += 1
    over.set()
    if lease is not None and lease._hold.passed:
        passed += 1
    if lease is not None and lease.held:
        lease.release()
    if not other.done.wait(3):
        orphans.append("the other waits in vain: " + tracer.where)
        break
    if tracer.left > 0:
        break
    if not is_free("x", 1.0):
        orphans.append(tracer.where)
        admin.delete("x")
    third = Other(lambda: None)
    if not third.done.wait(3):
        orphans.append("the seat stays taken: " + tracer.where)
        break
    if len(orphans) > 5:
        break
cohorts = client._driver.cohorts
third.thread.join(3)
other.thread.join(3)
say("interrupted", interrupted > 60 and interrupted > 0.9 * (moment - 1))
if cohorts.active_holds or cohorts.local_queues or cohorts._deactivating:
    say("left", cohorts.active_holds, cohorts.local_queues, cohorts._deactivating)
for orphan in orphans:
    say(orphan.rpartition("/holdfast/")[2], "in", orphan[:40])
client.close()
"""
)


@pytest.mark.long
@pytest.mark.parametrize("step", ["acquire", "release", "leave"])
def test_interrupt_after_every_single_bytecode_on_the_way_to_the_next_in_line(server: Server, step: str) -> None:
    with Script(EVERY_MOMENT_IN_LINE, server.url, step) as script:
        assert script.finish(110.0, quiet=False) == "interrupted True\n"
