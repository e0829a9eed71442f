"""Run on a host of a lab: forks a process that moves to another host, given as the argument, and says how it ends; then starts another."""

import os
import socket
import sys
import time
from collections.abc import Sequence

from atoll.runtime.supervise.fork_server import ForkServer
from atoll.runtime.supervise.hosts import InLab, ProcessSpec, find_lab


def live_there(arguments: Sequence[str]) -> int:
    """Says where it is, and waits to be killed."""
    view = find_lab(os.environ)
    assert view is not None
    with socket.create_server((view.address, 0)):  # only there it can be bound
        print(f"on {socket.gethostname()} as {view.host}", flush=True)
        time.sleep(1000)
    return 0


def main(name: str) -> None:
    """Two processes there, one after the other."""
    server = ForkServer({"tests.live_there": live_there})
    host = InLab(name, server)
    for _ in range(2):
        spec = ProcessSpec(name="there", role="test", command=(host.python, "-m", "tests.live_there"), host=host, terminal=True)
        process, _ = host.start(spec)
        while process.poll() is None:
            time.sleep(0.02)
        print(process.how(), flush=True)
    server.close()


if __name__ == "__main__":
    main(sys.argv[1])
