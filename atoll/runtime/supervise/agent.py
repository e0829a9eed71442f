"""The far end of an ssh connection: starts processes of a run on its host, passes on what they print, and kills them when the line ends.

Its text is sent over the connection and run by the host's own Python (standard library only, no Atoll needed), so that what is wrong there
can be told. Messages are JSON, one a line, on standard input and output. However the connection ends — the supervisor is killed, ssh is,
the session of sshd is, the cable is pulled — nothing that was started here outlives it by more than `SILENCE_SECONDS`.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

TICK_SECONDS = 5  # between two signs of life, which the supervisor answers
SILENCE_SECONDS = 30  # without any answer: the line is cut
LOOK_SECONDS = 0.05
DRAIN_SECONDS = 1.0  # for what a dead process has printed to arrive
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class AgentChild:
    """A process, the leader of its own session."""

    def __init__(self, number: int, request: "dict[str, Any]") -> None:
        self.number = number
        self.ended_at: "float | None" = None
        directory = os.path.expanduser(request["directory"])
        command = [request["command"][0] or sys.executable, *request["command"][1:]]
        self.process = subprocess.Popen(
            command,
            env={**request["defaults"], **os.environ, **request["environment"]},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.streams = {self.process.stdout.fileno(): "out", self.process.stderr.fileno(): "err"}

    def signal(self, number: int) -> None:
        """To everybody in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def pass_on(self, stream: int) -> None:
        """What it has printed."""
        data = os.read(stream, 65536)
        if data:
            send_message(id=self.number, data=data.decode("latin-1"), stream=self.streams[stream])
        else:
            del self.streams[stream]

    def over(self) -> bool:
        """Whether it has ended and all it printed was passed on; what it left running in its session is killed."""
        if self.ended_at is None:
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.ended_at = time.monotonic()
        return not self.streams or time.monotonic() - self.ended_at > DRAIN_SECONDS


children: "dict[int, AgentChild]" = {}


def die_with_parent() -> None:
    """In a new process: the kernel kills it when this one ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def send_message(**message: object) -> None:
    """To the supervisor; where nobody reads any more, this is the end."""
    data = json.dumps(message).encode() + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        end()


def end(*_: object) -> None:
    """Nobody is there any more."""
    for child in children.values():
        child.signal(signal.SIGKILL)
    os._exit(0)


def obey(message: "dict[str, Any]") -> None:
    """A request of the supervisor's."""
    signal.alarm(SILENCE_SECONDS)
    if "start" in message:
        try:
            children[message["start"]] = AgentChild(message["start"], message)
        except OSError as error:
            send_message(id=message["start"], failed=str(error.strerror or error), path=str(error.filename or ""))
    elif "signal" in message:
        if message["id"] in children:
            children[message["id"]].signal(message["signal"])
        if message["signal"] == signal.SIGSTOP:
            signal.alarm(0)  # the supervisor stops too, until it says otherwise


def main() -> None:
    """Until the line ends."""
    die_with_parent()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, end)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.alarm(SILENCE_SECONDS)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    send_message(hello=sys.argv[1], python=sys.executable, cores=cores, connection=os.environ.get("SSH_CONNECTION", ""))
    rest, ticked = b"", time.monotonic()
    while True:
        streams = [stream for child in children.values() for stream in child.streams]
        for ready in select.select([0, *streams], [], [], LOOK_SECONDS if children else 1.0)[0]:
            if ready == 0:
                data = os.read(0, 65536)
                if not data:
                    end()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    obey(json.loads(line))
            else:
                next(child for child in children.values() if ready in child.streams).pass_on(ready)
        for child in list(children.values()):
            if child.over():
                del children[child.number]
                send_message(id=child.number, code=child.process.returncode)
        if time.monotonic() - ticked > TICK_SECONDS:
            ticked = time.monotonic()
            send_message(tick=True)


if __name__ == "__main__":
    main()
