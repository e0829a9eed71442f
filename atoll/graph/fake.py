"""Models and batches without memory: fake copies to capture, and answers for code that asks a fake tensor for its value.

`torch.export` has no values, so a model whose Python code asks for one (`.item()`, `if mask.any():`) stops it. One eager run of a real copy
tells what each question was answered, by the place in the code that asked; the capture replays the answers and leaves an assertion in the
program for each of them, so that data which would have taken another branch raises instead of training wrongly.

CTC loss becomes one opaque operator: the shapes inside PyTorch's own depend on data, so it cannot be captured as it is.
"""

import contextlib
import copy
import io
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from atoll.errors import CaptureError

__all__ = ["build_model", "fake_model", "first_line", "is_symbolic", "new_fake_mode", "plain_batch", "quiet_torch", "real_model"]
__all__ += ["Answers", "Assumption", "Replayer", "ValueRecorder", "find_random_assumption"]

_REAL_MODEL_LIMIT_BYTES = 2**30  # above this no eager run is made to answer data-dependent questions


def new_fake_mode() -> FakeTensorMode:
    """A fake mode with symbolic shapes."""
    return FakeTensorMode(shape_env=ShapeEnv())


def build_model(model: nn.Module | Callable[[], nn.Module]) -> tuple[nn.Module, str]:
    """The module itself, or what the builder makes on the meta device; and a note, if that allocated the weights.

    A builder that needs values (`.item()` in a constructor) cannot run on meta; it is then run for real.
    """
    if isinstance(model, nn.Module):
        return model, ""
    note = ""
    try:
        with torch.device("meta"):
            built = model()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise CaptureError(f"building the model failed: {error}") from error
        built = model()
        note = f"the model was built with real weights, because its constructor needs values: {first_line(error)}"
    if not isinstance(built, nn.Module):
        raise CaptureError(f"the job's model must be a torch.nn.Module or a function that returns one, got {type(built).__name__}")
    return built, note


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Where an operator fails on fakes PyTorch prints a half-made program and logs a traceback; who is inside handles or tells it."""
    wanted = {"torch.fx.experimental.symbolic_shapes": logging.ERROR, "torch._subclasses.fake_tensor": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in wanted}
    for name, level in wanted.items():
        logging.getLogger(name).setLevel(level)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that PyTorch may add."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def is_symbolic(size: Any) -> bool:
    """Whether a size depends on the batch; export leaves one it had to fix as a symbol that is a number."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers and tensors kept as plain attributes."""
    found: list[Tensor] = []
    for module in model.modules():
        found += [value for value in module._parameters.values() if value is not None]
        found += [value for value in module._buffers.values() if value is not None]
        found += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return found


def _copy_with(model: nn.Module, substitute: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy in which every tensor is replaced, tied ones by the same; the weights themselves are never copied."""
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(model):
        if id(tensor) in memo:
            continue
        replacement = substitute(tensor)
        if isinstance(tensor, nn.Parameter):
            replacement = nn.Parameter(replacement, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = replacement
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(f"the model cannot be copied: {error}; pass a function that builds it instead of the model itself") from error


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model, in training mode, that holds no memory."""

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    return _copy_with(model, fake).train()


def real_model(
    model: nn.Module, builder: nn.Module | Callable[[], nn.Module], most_bytes: float = _REAL_MODEL_LIMIT_BYTES
) -> nn.Module | None:
    """A copy of the model with values, to be run once on the CPU; None when it is too large for that.

    A model that was built on meta gets its builder's own values, or small random ones when there is no builder.
    """
    tensors = _tensors_of(model)
    if sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values()) > most_bytes:
        return None
    on_meta = any(tensor.device.type == "meta" for tensor in tensors)
    if on_meta and not isinstance(builder, nn.Module):
        return builder().train()
    generator = torch.Generator().manual_seed(0)

    def real(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return tensor.detach().to("cpu", copy=True)
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return value.normal_(0.0, 0.02, generator=generator) if tensor.is_floating_point() else value

    return _copy_with(model, real).train()


def plain_batch(batch: Any) -> Any:
    """The batch as containers `torch.export` knows: other mappings (a tokenizer's output) become a dict."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return dict(batch)
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(batch)):
        raise CaptureError(f"the job's batch holds no tensor: got {type(batch).__name__}; collate_fn must return tensors")
    return batch


@cache
def _operator() -> Any:
    """Registered when it is first needed: `atoll::ctc_loss`, whose backward is that of PyTorch's loss."""

    @torch.library.custom_op("atoll::ctc_loss", mutates_args=())
    def operator(
        log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, reduction: str, zero_infinity: bool
    ) -> Tensor:
        return torch.nn.functional.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)

    @operator.register_fake
    def _(
        log_probs: Tensor, targets: Any, input_lengths: Any, target_lengths: Any, blank: Any, reduction: str, zero_infinity: Any
    ) -> Tensor:
        return log_probs.new_empty((log_probs.shape[1],) if reduction == "none" else ())

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.options = inputs[4:]

    operator.register_autograd(_backward, setup_context=setup)
    return operator


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    log_probs, *rest = ctx.saved_tensors
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        loss = torch.nn.functional.ctc_loss(leaf, *rest, *ctx.options)
    (result,) = torch.autograd.grad(loss, leaf, gradient)
    return result, None, None, None, None, None, None


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` in a form that can be captured."""
    result: Tensor = _operator()(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    return result


_ASKING: frozenset[Any] = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.is_nonzero,
    }
)

Answers = dict[tuple[str, int], list[Any]]


class Assumption(msgspec.Struct, frozen=True, kw_only=True):
    """A value the captured program takes for granted; it checks it when it runs."""

    where: str  # "modeling_x.py:120"
    value: str
    seen: bool  # True: an eager run gave this value; False: nobody could run the model, so it is the default answer


_DRAWS = 200  # a branch taken once in fifty times is all but surely seen


def find_random_assumption(program: ExportedProgram) -> str:
    """What a program takes for granted although chance decides it; "" if nothing.

    Such an assumption depends on nothing but random numbers, so it can be tried: a draw of zero probability (layerdrop of 0) never fails.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for node in program.graph.nodes:
            if node.target is not torch.ops.aten._assert_async.msg:
                continue
            causes = _causes(node.args[0])
            if causes is not None and not all(_evaluate(causes) for _ in range(_DRAWS)):
                return str(node.args[1])
    return ""


def _causes(value: Any) -> list[fx.Node] | None:
    """Everything a value is computed from, in order; None when that includes parameters, buffers or the batch."""
    found: dict[fx.Node, None] = {}
    wanted = [value]
    while wanted:
        node = wanted.pop()
        if node.op != "call_function":
            return None
        if node not in found:
            found[node] = None
            wanted += node.all_input_nodes
    return sorted(found)


def _evaluate(causes: list[fx.Node]) -> bool:
    values: dict[fx.Node, Any] = {}
    for node in causes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: values[leaf] if isinstance(leaf, fx.Node) else leaf)
        target: Any = node.target
        values[node] = target(*args, **kwargs)
    return bool(values[causes[-1]])


def _call_site() -> tuple[str, int]:
    """The nearest frame that is the model's own code: not torch's, except for its `nn` modules, and not this file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        inside_torch = "/torch/" in name and "/nn/modules/" not in name
        if not inside_torch and name != __file__:
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0


class ValueRecorder(TorchFunctionMode):
    """While it is on, every value asked of a tensor is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: Answers = defaultdict(list)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func in _ASKING:
            self.answers[_call_site()].append(value)
        return value


class Replayer(TorchFunctionMode):
    """While it is on, questions get the recorded answers, each with an assertion in the program.

    Without a record (`answers` is None: the model is too large to run) a yes-or-no question is answered no, and any other is left alone.
    """

    def __init__(self, answers: Answers | None) -> None:
        super().__init__()
        self._answers = answers
        self._asked: Counter[tuple[str, int]] = Counter()
        self.assumptions: list[Assumption] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.ctc_loss:
            return ctc_loss(*args, **(kwargs or {}))
        if func not in _ASKING:
            return func(*args, **(kwargs or {}))
        site = _call_site()
        if self._answers is None:
            if func not in (torch.Tensor.__bool__, torch.is_nonzero):
                return func(*args, **(kwargs or {}))
            return self._assume(args[0], False, site, seen=False)
        earlier = self._answers.get(site, [])
        index = self._asked[site]
        self._asked[site] += 1
        if index >= len(earlier):  # the eager run did not pass here: let export say what it thinks of it
            return func(*args, **(kwargs or {}))
        return self._assume(args[0], earlier[index], site, seen=True)

    def _assume(self, tensor: torch.Tensor, value: Any, site: tuple[str, int], *, seen: bool) -> Any:
        where = f"{site[0].rpartition('/')[2]}:{site[1]}"
        asked = tensor.detach()
        if isinstance(value, list):
            equal = asked == torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
        else:
            equal = torch.ops.aten.eq.Scalar(asked, value)
        torch.ops.aten._assert_async.msg(equal.all(), f"the captured program took {value!r} for granted at {where}")
        self.assumptions.append(Assumption(where=where, value=repr(value), seen=seen))
        return value
