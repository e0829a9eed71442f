"""`torch.compile` of what a process computes: units of captured programs, or the user's own loss. Numbers are those of the uncompiled run.

Random numbers stay keyed (`rng.py`): dropout on a CPU is an operator of ours inside the compiled code, every other random operator, and
exchanges between devices, run between two compiled pieces. What it costs is counted here: seconds, compiled pieces, interruptions.
"""

import logging
import shutil
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from atoll.errors import JobError, JobFailedError
from atoll.events import Compiled, Warned
from atoll.graph.regions import draws_in, regions_of
from atoll.job import Job
from atoll.runtime.stage.rng import Draw, DrawKey, EagerDraws

__all__ = ["CompiledDraws", "Compiler", "compile_errors", "compiler_for"]

aten = torch.ops.aten
_TOO_OFTEN = "torch._dynamo hit config."  # how PyTorch's own warning begins


def compiler_for(job: Job, device: torch.device) -> "Compiler | None":
    """What compiles the job's stages here; None where they are not to be. JobError where this machine cannot."""
    if job.compile is False:
        return None
    options = {} if job.compile is True else dict(job.compile)
    _check_backend(options.get("backend", "inductor"), device)
    return Compiler(options)


def _check_backend(backend: Any, device: torch.device) -> None:
    from torch._dynamo import list_backends

    if isinstance(backend, str) and backend not in (known := list_backends(exclude_tags=())):
        raise JobError(f"Job: compile: there is no backend {backend!r}; there are {', '.join(sorted(known))}")
    if backend == "inductor":
        missing = _missing_tool(device)
        if missing:
            raise JobError(f"Job: compile: {missing}, or take another backend: compile={{'backend': 'aot_eager'}}, which is no faster")


def _missing_tool(device: torch.device) -> str:
    """What the inductor cannot do without: a C++ compiler for CPUs, Triton besides for GPUs."""
    from torch._inductor import config
    from torch.utils._triton import has_triton

    wanted = [name for name in (config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else [config.cpp.cxx]) if name]
    if not any(shutil.which(name) for name in wanted):
        return f"torch.compile needs a C++ compiler, and there is no {' or '.join(wanted)} here; install one (apt-get install g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "torch.compile needs Python's headers, and there is no Python.h here; install them (apt-get install python3-dev)"
    if device.type != "cpu" and not has_triton():
        return f"torch.compile needs Triton on '{device.type}', which is not installed here; install it (pip install triton)"
    return ""


class Compiler:
    """Compiles for one process of a run, and counts what that takes. `close` it at the end."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from torch._dynamo.callback import callback_handler

        self._options, self._handler, self._lock = options, callback_handler, threading.Lock()
        self._log = logging.getLogger("torch._dynamo.convert_frame")
        self._seconds, self._graphs, self._warnings = 0.0, 0, list[str]()
        self._breaks = self._graph_breaks()  # of this process before
        self._began = 0.0
        self.drawn_apart = _apart(_drawn_apart)
        _register_noise()
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while it compiles
        self._inside: AbstractContextManager[None] = nullcontext()
        self._handler.register_start_callback(self._start)
        self._handler.register_end_callback(self._end)
        self._log.addFilter(self._take_warning)
        # PyTorch's own look at what goes from one compiled piece to the next
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor is being accessed")

    def close(self) -> None:
        """Nothing is counted any more."""
        if self._start in self._handler.start_callbacks:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._end)
            self._log.removeFilter(self._take_warning)

    @property
    def pending(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._graphs or self._warnings)

    def take(self, source: str = "") -> list[Compiled | Warned]:
        """What there is to tell since this was last asked."""
        with self._lock:
            messages, self._warnings = self._warnings, []
            told: list[Compiled | Warned] = [Warned(message=message, source=source) for message in messages]
            if self._graphs:
                before, self._breaks = self._breaks, self._graph_breaks()
                breaks = self._breaks - before
                told.insert(0, Compiled(seconds=self._seconds, graphs=self._graphs, graph_breaks=breaks, source=source))
            self._seconds, self._graphs = 0.0, 0
        return told

    @staticmethod
    def _graph_breaks() -> int:
        from torch._dynamo.utils import counters

        return sum(counters["graph_break"].values())

    def unit(self, graph_module: fx.GraphModule, undifferentiated: Container[str] = ()) -> Callable[..., Any] | None:
        """What runs a unit's graph from now on; None where it has to stay as it is, which is told.

        `undifferentiated` are values that no gradient comes to. Compiled code would make zeros of that, and gradients of zeros for
        parameters that have none: an optimizer with weight decay moves those. So they are cut off.
        """
        reason = _why_not(graph_module)
        if reason:
            self.warn(f"a part of the model is not compiled: {reason}")
            return None
        _cut_off(graph_module, undifferentiated)
        _adapt(graph_module)
        return self.function(graph_module.forward)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled when it is first called."""
        compiled = torch.compile(function, **self._options)

        def call(*arguments: Any) -> Any:
            with compile_errors():
                return compiled(*arguments)

        return call

    def warn(self, message: str) -> None:
        """To be told once."""
        with self._lock:
            if message not in self._warnings:
                self._warnings.append(message)

    def _start(self, what: Any) -> None:
        self._began, self._inside = time.perf_counter(), self.around()
        self._inside.__enter__()

    def _end(self, what: Any) -> None:
        self._inside.__exit__(None, None, None)
        with self._lock:
            self._seconds += time.perf_counter() - self._began
            self._graphs += 1

    def _take_warning(self, record: logging.LogRecord) -> bool:
        """PyTorch's six lines on too many recompilations become a sentence; everything else passes."""
        if not str(record.msg).startswith(_TOO_OFTEN):
            return True
        _, limit, function, reason = (*(record.args if isinstance(record.args, tuple) else ()), "", "", "", "")[:4]
        self.warn(
            f"{function} was compiled {limit} times, and runs uncompiled wherever none of these fits: its inputs differ too often "
            f"({str(reason).splitlines()[0] if reason else 'no reason given'}); pad them to few sizes, or let sizes vary in the compiled "
            "code: compile={'dynamic': True}"
        )
        return False


@contextmanager
def compile_errors() -> Iterator[None]:
    """What goes wrong in compiling, forward or backward, is told in a sentence."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
        raise JobFailedError(f"torch.compile failed: {what}; train without compile, or with compile={{'backend': 'aot_eager'}}") from error


# ---- random numbers and exchanges in compiled code


@cache
def _register_noise() -> None:
    """`atoll::keyed_noise` is what dropout multiplies by: a function of its place in the run alone, so that compilers may move it."""

    @torch.library.custom_op("atoll::keyed_noise", mutates_args=())
    def operator(size: list[int], stride: list[int], dtype: torch.dtype, p: float, key: Tensor, number: int) -> Tensor:
        torch.default_generator.manual_seed(DrawKey.seed_of(key, number))
        return _like(size, stride, dtype, "cpu").bernoulli_(1 - p).div_(1 - p)

    @operator.register_fake
    def _(size: Any, stride: Any, dtype: torch.dtype, p: float, key: Tensor, number: int) -> Tensor:
        return _like(size, stride, dtype, "cpu")


def _like(size: Any, stride: Any, dtype: torch.dtype, device: str) -> Tensor:
    """As `torch.empty_like` of a tensor with these strides: numbers fall on elements in the order of memory."""
    return torch.empty_like(torch.empty_strided(size, stride, dtype=dtype, device="meta"), device=device)


def _dropout(key: DrawKey, number: int, x: Tensor, p: float) -> Tensor:
    """PyTorch's own arithmetic of dropout on a CPU, with the noise of this place."""
    noise: Tensor = torch.ops.atoll.keyed_noise(x.shape, x.stride(), x.dtype, p, key.place, number)
    return x * noise


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is never compiled."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def _drawn_apart(draws: EagerDraws, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Between two compiled pieces."""
    draws.seed()
    return function(*args, **kwargs)


def _divides(p: Any) -> bool:
    return isinstance(p, float) and 0 < p < 1


class CompiledDraws(EagerDraws):
    """Around a compiled forward: as `EagerDraws`, whose handler PyTorch compiles along."""

    def __init__(self, key: DrawKey, model: nn.Module, compiler: Compiler) -> None:
        super().__init__(key, model)
        self._drawn_apart = compiler.drawn_apart

    def _drawn(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is functional.dropout and not (args[3] if len(args) > 3 else kwargs.get("inplace", False)):
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            if args and isinstance(args[0], Tensor) and args[0].device.type == "cpu" and _divides(p):
                number, self.count = self.count, self.count + 1
                return _dropout(self._key, number, args[0], p)
        return self._drawn_apart(self, function, args, kwargs)


class _KeyedDropout(nn.Module):
    """`aten.dropout` in a unit, compiled along."""

    def __init__(self, key: DrawKey, number: int) -> None:
        super().__init__()
        self._key, self._number = key, number

    def forward(self, x: Tensor, p: float, train: bool) -> Tensor:
        return _dropout(self._key, self._number, x, p)


def _why_not(graph_module: fx.GraphModule) -> str:
    """Why a unit cannot be compiled: compiled code cannot be interrupted inside a region."""
    for node in graph_module.graph.nodes:
        regions = regions_of(node, graph_module)
        if regions and node.op == "call_function" and draws_in(node, graph_module):
            return f"{node.name} draws random numbers inside a region with its own gradient or precision"
    return ""


def _adapt(module: fx.GraphModule) -> None:
    """Let random operators and all that is not PyTorch's own run between compiled pieces, except dropout, which is compiled."""
    draw: tuple[Draw, int] | None = None
    for node in list(module.graph.nodes):
        if node.op == "call_module" and isinstance(called := module.get_submodule(str(node.target)), Draw):
            draw = called, int(node.args[0])
            module.graph.erase_node(node)
        elif node.op == "call_module":
            called.forward = _apart(called.forward)
        elif draw is not None and node.op == "call_function":
            _draw_with(module, node, *draw)
            draw = None
        elif node.op == "call_function" and not _is_pytorchs(node.target):
            node.target = _apart(node.target)
    assert draw is None, "every draw seeds the operator after it"
    module.recompile()


def _cut_off(module: fx.GraphModule, values: Container[str]) -> None:
    """Their users read them detached."""
    for node in [node for node in module.graph.nodes if node.name in values]:
        users = list(node.users)
        with module.graph.inserting_after(node):
            detached = module.graph.call_function(aten.detach.default, (node,))
        for user in users:
            user.replace_input_with(node, detached)


def _draw_with(module: fx.GraphModule, node: fx.Node, draw: Draw, number: int) -> None:
    name = f"draw_{number}_{node.name}"
    if node.target is aten.dropout.default and len(node.args) == 3 and node.args[2] is True and draw.on_cpu and _divides(node.args[1]):
        module.add_module(name, _KeyedDropout(draw.key, number))
        node.op, node.target = "call_module", name
        return
    function = node.target

    def drawn(*arguments: Any, **named: Any) -> Any:
        draw(number)
        return function(*arguments, **named)  # type: ignore[operator]

    node.target = _apart(drawn)


def _is_pytorchs(target: Any) -> bool:
    """An operator, or a function of PyTorch's or Python's that needs no look inside."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return True
    return (getattr(target, "__module__", None) or "").partition(".")[0] in ("_operator", "operator", "builtins", "math", "torch")
