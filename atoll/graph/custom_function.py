"""Keeping a user's `torch.autograd.Function` through export, which would trace its forward and forget its backward."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._export.wrappers import allow_in_pre_dispatch_graph
from torch.utils.checkpoint import CheckpointFunction

from atoll.errors import CaptureError

__all__ = ["keep_custom_functions"]


@contextlib.contextmanager
def keep_custom_functions() -> Iterator[None]:
    """While it is on, `apply` of a custom function becomes one node of the program that calls it by name.

    Export offers this only as a decorator on each class's own `apply`; users' classes are not ours to edit, so the shared base's is
    replaced for the duration of one capture and put back.
    """
    base: Any = torch.autograd.Function
    keep: Any = allow_in_pre_dispatch_graph
    original = base.__dict__["apply"]
    kept = keep(original.__func__)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and torch.compiler.is_exporting():
            raise CaptureError(
                "the model calls torch.utils.checkpoint with use_reentrant=True, through which gradients cannot be followed; pass "
                "use_reentrant=False, or leave it out: plans say themselves what is recomputed"
            )
        if cls.__module__.startswith("torch.") or not torch.compiler.is_exporting():
            return original.__func__(cls, *args, **kwargs)
        if "<locals>" in cls.__qualname__ or (cls.__module__ == "__main__" and "." in cls.__qualname__):
            raise CaptureError(f"autograd function {cls.__qualname__!r} is defined inside a function; move it to the top of its module")
        return kept(cls, *args, **kwargs)

    apply.__name__ = "apply"
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = original
