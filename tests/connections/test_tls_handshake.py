"""A TLS handshake that does not come to its end leaves no socket open."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.support import FACES, Script

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@contextlib.contextmanager
def listening(treat: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port whose connections are treated like that, and closed with a reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    with near:
                        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                        with contextlib.suppress(OSError):  # the client has given up
                            treat(near)

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()


@contextlib.contextmanager
def nothing_unclosed() -> Iterator[None]:
    gc.collect()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert [str(one.message) for one in found] == []


@pytest.fixture
def long_to_read(certificate: tuple[str, str], tmp_path: Path) -> str:
    """Certificates to trust that take a while to load, which redis-py does between connecting and the handshake."""
    path = tmp_path / "trusted.pem"
    path.write_text(Path(certificate[0]).read_text() * 1000)
    return str(path)


def reset_before_hello(near: socket.socket) -> None:
    time.sleep(0.03)  # else connect() itself may report it


def reset_after_hello(near: socket.socket) -> None:
    near.recv(65536)


def answer_nonsense(near: socket.socket) -> None:
    near.recv(65536)
    near.sendall(b"-ERR this is not TLS\r\n")
    near.recv(65536)


TREATMENTS = [reset_before_hello, reset_after_hello, answer_nonsense]


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.kind)
@pytest.mark.parametrize("treat", TREATMENTS, ids=lambda treat: treat.__name__)
@pytest.mark.parametrize("scheme", ["rediss", "rediss+sentinel"])
def test_a_handshake_that_is_cut_leaves_no_socket_open(
    face: Any, long_to_read: str, treat: Callable[[socket.socket], None], scheme: str
) -> None:
    with listening(treat) as port, nothing_unclosed():
        path = "/main/0" if scheme == "rediss+sentinel" else ""
        client = face(f"{scheme}://localhost:{port}{path}?ssl_ca_certs={long_to_read}", timeout=1.0)
        with pytest.raises(holdfast.Unavailable):
            client.lock("x").acquire(timeout=0.2)
        client.close()


@pytest.mark.parametrize("scheme", ["rediss", "etcds"])
def test_ctrl_c_in_a_handshake_leaves_no_socket_open(certificate: tuple[str, str], scheme: str) -> None:
    code = """
    import gc
    try:
        holdfast.connect(url, timeout=20).lock("x").acquire()
    except KeyboardInterrupt:
        say("interrupted")
    gc.collect()
    """
    arrived, over = threading.Event(), threading.Event()

    def hang(near: socket.socket) -> None:
        near.recv(65536)
        arrived.set()
        over.wait(20.0)

    with listening(hang) as port, Script(code, f"{scheme}://localhost:{port}?ssl_ca_certs={certificate[0]}") as script:
        assert arrived.wait(20.0)
        script.send(signal.SIGINT)
        script.hear("interrupted")
        over.set()
        script.finish()
