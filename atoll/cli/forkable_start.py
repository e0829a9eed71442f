"""The start of a run of which its processes take over what it has imported and captured: they are forked where that is safe."""

import contextlib
import os
from collections.abc import Sequence
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from atoll.cli.output import show_what_the_terminal_can
from atoll.cli.target import Target
from atoll.lab.environment import LINKS
from atoll.runtime.mode import CapturedJob, ModeRuntime
from atoll.runtime.supervise.fork_server import ForkServer, open_files, unsafe

__all__ = ["ForkableStart"]

# Libraries read these when they are loaded: NumPy's BLAS would start threads at once, and what broken connections mean is said in one
# sentence by those who lose them.
_WHEN_LOADED = {"OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class ForkableStart:
    """Around a run's start: from `prepare` until `begin` this process stays without threads, so that it can be forked.

    `server` forks the run's processes on this machine; None where it cannot, for the reason in `why_not`.
    """

    def __init__(self, runtime: ModeRuntime) -> None:
        self._runtime = runtime
        self.server: ForkServer | None = None
        self.why_not = ""
        self._known: CapturedJob | None = None
        self._threads = 0  # that PyTorch has anywhere else; 0: it was not loaded
        self._added: dict[str, str] = {}  # to the environment
        self._bars: Any = None  # those of tqdm, if it is installed
        self._interval = 0  # between looks of their thread

    def __enter__(self) -> Self:
        return self

    def prepare(self) -> None:
        """Loads PyTorch, with one thread for what the script and its capture compute."""
        self._opened = open_files()
        self._added = {name: value for name, value in _WHEN_LOADED.items() if name not in os.environ}
        os.environ.update(self._added)
        import torch

        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with contextlib.suppress(ImportError):
            self._bars = import_module("tqdm").tqdm  # `fx.Interpreter` makes a bar, shown or not, and a bar a thread
            self._interval, self._bars.monitor_interval = self._bars.monitor_interval, 0

    def begin(self, model: Target) -> None:
        """The job is captured: from here on processes can be forked. The server prepares itself while this process goes on."""
        if model.own_loop:
            self.why_not = "the script makes the steps itself"  # so every rank executes it
        else:
            lab = "a lab without namespaces tells its hosts apart by how they start"
            self.why_not = lab if LINKS in os.environ else self._unsafe(model)
        if not self.why_not:
            programs = {"atoll.cli.worker": self._rank, "atoll.cli.swarm_process": self._member, "atoll.cli.island_process": self._island}
            self.server = ForkServer(programs, lambda: self._load(model))
        self._restore()

    def _unsafe(self, model: Target) -> str:
        """Why processes cannot be forked; a stream whose first samples were looked at is no reason, since each process reads it anew."""
        why = unsafe(self._opened)
        if why and model.job is not None:
            model.job.samples.forget()
            why = unsafe(self._opened)
        return why

    def _load(self, model: Target) -> None:
        assert model.job is not None
        assert model.captured is not None
        self._known = self._runtime.hand_over(model.job, model.captured)

    def _rank(self, arguments: Sequence[str]) -> int:
        from atoll.cli.worker import main

        show_what_the_terminal_can()
        return main(arguments, self._known)

    def _member(self, arguments: Sequence[str]) -> int:
        from atoll.cli.swarm_process import main

        show_what_the_terminal_can()
        return main(arguments, self._known)

    def _island(self, arguments: Sequence[str]) -> int:
        from atoll.cli.island_process import main

        show_what_the_terminal_can()
        return main(arguments, self._known)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()
        if self.server is not None:
            self.server.close()

    def _restore(self) -> None:
        for name in self._added:
            os.environ.pop(name, None)
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)
        if self._bars is not None:
            self._bars.monitor_interval = self._interval
