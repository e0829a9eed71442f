"""Commands on hosts of a lab, looked after until the last has ended: one at the terminal, or all with the host's name before each line."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, BinaryIO, Literal, TypeAlias

from atoll.lab.environment import device_environments
from atoll.lab.lab import Lab, LabProcess

__all__ = ["Spread", "run_in_lab"]

Spread: TypeAlias = Literal["host", "hosts", "devices"]
_LOOK_SECONDS = 0.05


def run_in_lab(lab: Lab, command: Sequence[str], *, spread: Spread, host: str) -> int:
    """Runs a command on one host, on every host, or once for every device of every host; returns the exit code.

    That is 0 if all ended well, else the first failure's. Who was killed by a fault together with its host has not failed. The first Ctrl-C
    or SIGTERM is passed on to the commands; the second ends everything.
    """
    runner = _Runner(lab, list(command), spread)
    with runner.obeying_signals():
        for name in [host] if spread == "host" else lab.hosts:
            runner.start(name)
        if spread != "host":
            lab.booted = runner.start
        return runner.wait()


class _Runner:
    """The processes and what they print."""

    def __init__(self, lab: Lab, command: list[str], spread: Spread) -> None:
        self._lab, self._command, self._spread = lab, command, spread
        self._terminal = spread == "host" and sys.stdin is not None and sys.stdin.isatty()
        self._processes: list[LabProcess] = []
        self._readers: list[threading.Thread] = []
        self._printing = threading.Lock()
        self._asked: list[int] = []

    def start(self, host: str) -> None:
        """What a host has to run."""
        if self._spread == "host":
            self._processes.append(self._lab.start(host, self._command, stdin=None, session=not self._terminal))
            return
        environments = device_environments(self._lab.cluster, host) if self._spread == "devices" else [{}]
        for number, environ in enumerate(environments):
            process = self._lab.start(host, self._command, environ=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            name = f"{host}/{number}" if self._spread == "devices" else host
            for stream, into in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert stream is not None
                reader = threading.Thread(target=self._pass_on, args=(stream, f"[{name}] ".encode(), into.buffer), daemon=True)
                reader.start()
                self._readers.append(reader)
            self._processes.append(process)

    def wait(self) -> int:
        """Until all have ended, also those that restored hosts start meanwhile."""
        failed: int | None = None
        while any(process.returncode is None for process in self._processes) or self._lab.reviving:
            for process in self._processes:
                code = process.returncode
                if failed is None and code and not self._excused(process):
                    failed = code
            if len(self._asked) > 1:
                for process in self._processes:
                    process.kill()
            time.sleep(_LOOK_SECONDS)
        for reader in self._readers:
            reader.join(1)
        codes = [process.returncode for process in self._processes if not self._excused(process)]
        code = failed or next((code for code in codes if code), 0)
        return 128 - code if code < 0 else code

    def _excused(self, process: LabProcess) -> bool:
        """One of many that died with its host; if it was the only one, nothing is left that could have ended well."""
        return process.host_killed and self._spread != "host"

    def _pass_on(self, stream: IO[bytes], prefix: bytes, into: BinaryIO) -> None:
        with stream:
            for line in stream:
                with self._printing, contextlib.suppress(OSError, ValueError):  # nobody reads any more: the commands go on
                    into.write(prefix + line.rstrip(b"\r\n") + b"\n")
                    into.flush()

    @contextmanager
    def obeying_signals(self) -> Iterator[None]:
        """Passes the first on. At a terminal Ctrl-C reaches the command by itself."""

        def ask(number: int, frame: FrameType | None) -> None:
            self._asked.append(number)
            if number != signal.SIGINT or not self._terminal:
                for process in self._processes:
                    process.signal(number)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
