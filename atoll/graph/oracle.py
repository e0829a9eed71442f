"""Answers for models whose Python code asks a tensor for its value (`.item()`, `if mask.any():`) while being captured.

`torch.export` has no values, so such a model stops it. One eager run tells what each question was answered, by the place in the code that
asked; the capture replays the answers and leaves an assertion in the program for each of them, so that data which would have taken
another branch raises instead of training wrongly.

CTC loss becomes one opaque operator: the shapes inside PyTorch's own depend on data, so it cannot be captured as it is.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

__all__ = ["Answers", "Assumption", "Replayer", "ValueRecorder", "find_random_assumption"]


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
