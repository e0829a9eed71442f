"""Processes of a lockstep benchmark: one a rank, all on this machine; the first failure ends them all."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from atoll.cluster.memory import keep_freed_memory

__all__ = ["is_rank", "joined", "start_ranks"]

_PATIENCE = timedelta(minutes=5)  # of a collective: machines are shared, and slow at times
_LOOK_S = 0.05


def is_rank() -> bool:
    """Whether this process is one of those that `start_ranks` started."""
    return "RANK" in os.environ


def start_ranks(
    script: Path, arguments: Sequence[str], ranks: int, *, host: str = "127.0.0.1", inside: Callable[[int], Sequence[str]] = lambda rank: ()
) -> int:
    """Run the script once a rank and return the first exit code that is not 0. `inside` gives what a rank's command is started by."""
    port = str(_free_port())
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": host, "MASTER_PORT": port}
        command = [*inside(rank), sys.executable, str(script), *arguments]
        processes.append(subprocess.Popen(command, env={**os.environ, **own, "OMP_NUM_THREADS": "1"}))
    try:
        return _first_failure(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _first_failure(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait for all, or for one that fails."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return failed[0] if failed else 0
        time.sleep(_LOOK_S)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def joined() -> Iterator[None]:
    """This rank among the others, over Gloo, on one thread and with the memory settings of a run."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
