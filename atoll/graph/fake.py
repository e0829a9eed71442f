"""Models and batches without memory: a copy of a module whose parameters and buffers are fake tensors on the CPU."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from atoll.errors import CaptureError

__all__ = ["build_model", "fake_model", "first_line", "is_symbolic", "new_fake_mode", "plain_batch", "real_model"]

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


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that PyTorch may add."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def is_symbolic(size: Any) -> bool:
    """Whether a size depends on the batch; export leaves one it had to fix as a symbol that is a number."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and tensors kept as plain attributes."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        found += [value for value in module._parameters.values() if value is not None]
        found += [value for value in module._buffers.values() if value is not None]
        found += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return found


def _copy_with(model: nn.Module, substitute: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
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

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    return _copy_with(model, fake).train()


def real_model(model: nn.Module, builder: nn.Module | Callable[[], nn.Module]) -> nn.Module | None:
    """A copy of the model with values, to be run once on the CPU; None when it is too large for that.

    A model that was built on meta gets its builder's own values, or small random ones when there is no builder.
    """
    tensors = _tensors_of(model)
    if sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values()) > _REAL_MODEL_LIMIT_BYTES:
        return None
    on_meta = any(tensor.device.type == "meta" for tensor in tensors)
    if on_meta and not isinstance(builder, nn.Module):
        return builder().train()
    generator = torch.Generator().manual_seed(0)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta":
            return tensor.detach().to("cpu", copy=True)
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return value.normal_(0.0, 0.02, generator=generator) if tensor.is_floating_point() else value

    return _copy_with(model, real).train()


def plain_batch(batch: Any) -> Any:
    """The batch as containers `torch.export` knows: other mappings (a tokenizer's output) become a dict."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return dict(batch)
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(batch)):
        raise CaptureError(f"the job's batch holds no tensor: got {type(batch).__name__}; the collate function must return tensors")
    return batch
