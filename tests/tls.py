"""TLS for tests: a certificate, and a relay that speaks TLS in front of a server that cannot."""

from __future__ import annotations

import select
import socket
import ssl
import subprocess
import threading
from pathlib import Path

__all__ = ["TlsRelay", "make_certificate"]


def make_certificate(folder: Path, *names: str) -> tuple[str, str]:
    """A self-signed certificate for localhost, or for these names instead, and its key."""
    named = ",".join(f"DNS:{name}" for name in names) or "DNS:localhost,IP:127.0.0.1"
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={names[0] if names else 'localhost'}", "-addext", f"subjectAltName={named}"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


class TlsRelay:
    """A loopback port that speaks TLS in front of one that does not, for server builds that cannot."""

    def __init__(self, port: int, certificate: str, key: str, *, wants_certificate: bool = False) -> None:
        self._upstream = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        if wants_certificate:
            self._context.load_verify_locations(certificate)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._relay, args=(plain,), daemon=True))
            self._threads[-1].start()

    def _relay(self, plain: socket.socket) -> None:
        # One thread for both directions, because two may not use the same TLS session at once.
        with plain, socket.create_connection(("127.0.0.1", self._upstream)) as far:
            try:
                with self._context.wrap_socket(plain, server_side=True) as near:
                    while True:
                        ready = [near] if near.pending() else select.select([near, far], [], [])[0]
                        for source in ready:
                            data = source.recv(65536)
                            if not data:
                                return
                            (far if source is near else near).sendall(data)
            except OSError:
                pass  # the client went away, or did not like our certificate

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
