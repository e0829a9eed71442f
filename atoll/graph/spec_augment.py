"""SpecAugment as one operator: Hugging Face's speech models draw its masks with NumPy, outside of what a captured program holds.

Their function `_compute_mask_indices` is replaced while a forward runs: in capture by the operator `atoll::spec_augment_mask`, whose
numbers follow from PyTorch's seed as those of dropout do; in an eager forward by the same numbers, drawn when it is told to.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["SpecAugmentCapture", "draw_mask", "replaced_masks"]

_NAME = "_compute_mask_indices"
_OWNER = "transformers."  # only its functions are called by name
_Function = Callable[..., Any]


def draw_mask(module: str, *args: Any, **kwargs: Any) -> Any:
    """What the module's own function draws from PyTorch's seed, a NumPy array; NumPy's generator is left as it was."""
    assert module.startswith(_OWNER), module
    original = getattr(importlib.import_module(module), _NAME)
    state = numpy.random.get_state()
    numpy.random.seed(torch.initial_seed() & 0xFFFFFFFF)
    try:
        return getattr(original, "original", original)(*args, **kwargs)
    finally:
        numpy.random.set_state(state)


@cache
def _operator() -> Any:
    """Registered when it is first needed."""

    @torch.library.custom_op("atoll::spec_augment_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def operator(
        module: str,
        batch_size: int,
        length: int,
        mask_prob: float,
        mask_length: int,
        attention_mask: Tensor | None,
        min_masks: int,
    ) -> Tensor:
        mask = draw_mask(module, (batch_size, length), mask_prob, mask_length, attention_mask, min_masks)
        return torch.from_numpy(mask)

    @operator.register_fake
    def _(module: str, batch_size: Any, length: Any, mask_prob: Any, mask_length: Any, attention_mask: Any, min_masks: Any) -> Tensor:
        return torch.empty((batch_size, length), dtype=torch.bool)

    return operator


def _captured(
    module: str,
    shape: tuple[Any, Any],
    mask_prob: float,
    mask_length: int,
    attention_mask: Tensor | None = None,
    min_masks: int = 0,
) -> Tensor:
    """The operator, called as Hugging Face calls its function."""
    mask: Tensor = _operator()(module, *shape, mask_prob, mask_length, attention_mask, min_masks)
    return mask


class _Replacement:
    """Stands in for a module's function while a forward runs."""

    def __init__(self, original: _Function, draw: _Function) -> None:
        self.original = original
        self._draw = partial(draw, original.__module__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._draw(*args, **kwargs)


@contextlib.contextmanager
def replaced_masks(model: nn.Module, draw: _Function) -> Iterator[None]:
    """While it is on, the model's SpecAugment calls `draw(module, …)`, where `module` is what `draw_mask` wants to be told."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__ if cls.__module__.startswith(_OWNER)}
    places = [sys.modules[name] for name in sorted(names) if hasattr(sys.modules.get(name), _NAME)]
    before = [getattr(place, _NAME) for place in places]
    for place, original in zip(places, before, strict=True):
        setattr(place, _NAME, _Replacement(original, draw))
    try:
        yield
    finally:
        for place, original in zip(places, before, strict=True):
            setattr(place, _NAME, original)


class SpecAugmentCapture(TorchFunctionMode):
    """While it is on, the model's masks are the operator's results, and `torch.tensor(mask)` is that mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._replaced = replaced_masks(model, _captured)

    def __enter__(self) -> Any:
        self._replaced.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._replaced.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and args and isinstance(args[0], Tensor):
            return args[0].to(device=kwargs.get("device"), dtype=kwargs.get("dtype")).clone()
        return func(*args, **kwargs)
