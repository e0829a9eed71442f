"""A real nats-server on loopback, for tests; where it is not installed they are skipped and say so."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
needs_nats = pytest.mark.skipif(PROGRAM is None, reason="nats-server is not installed (apt-get install nats-server)")


class NatsServer:
    """Can be stopped and started again on the same port with what it stored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.address = f"nats://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Until it answers."""
        assert PROGRAM is not None
        command = [PROGRAM, "-a", "127.0.0.1", "-p", str(self._port), "-js", "-sd", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            assert self._process.poll() is None, "nats-server ended"
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=1.0) as greeting:
                    if greeting.recv(4) == b"INFO":
                        return
            except OSError:
                continue

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.wait()


@contextmanager
def nats_server(folder: Path) -> Iterator[NatsServer]:
    """One for a test."""
    server = NatsServer(folder)
    try:
        yield server
    finally:
        server.kill()
