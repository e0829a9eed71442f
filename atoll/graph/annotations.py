"""`atoll.replica`, `atoll.split`, `atoll.stage`, `atoll.pipeline`: what the user demands of the plan, written where the model is built.

```
with atoll.replica(2):                       # two copies of the whole pipeline
    with atoll.pipeline(micro_batches=8):
        with atoll.stage():
            self.encoder = Encoder()
        with atoll.stage():
            self.decoder = Decoder()
atoll.split(model.lm_head, 4)                # or afterwards, on a module
atoll.default(model, atoll.replica())        # for every layer that has neither replica nor split
```

They are demands, not transformations: the model computes what it computed. What is not annotated is free.

An annotation covers the modules that are built inside its block or attached to a parent inside it; on a module, that module with all it
holds at that moment. The mark is kept on the module itself, so it survives copying, moving to another parent, the meta device and
pickling. Each time a block is entered it is a new annotation: a loop of `with atoll.stage():` makes as many stages as it has turns.

How modules are watched: torch's own registration hooks, set once per process at the first block and idle outside of blocks. They are not
removed again, because another thread may be iterating over torch's table of hooks at that moment. Which blocks are open is a context
variable, so modules built by other threads are not touched.
"""

import os
import sys
import time
import uuid
from collections.abc import Iterable
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar, overload

import msgspec
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from atoll.errors import AnnotationError
from atoll.graph.constraints import Annotation, Kind

__all__ = ["Annotation", "Scope", "annotations_of", "default", "pipeline", "replica", "split", "stage"]

_Module = TypeVar("_Module", bound=nn.Module)
_MARKS = "_atoll_annotations"


class _Block:
    """A block that is open: its annotation, and whether anything was built inside."""

    def __init__(self, annotation: Annotation) -> None:
        self.annotation = annotation
        self.built = False


_open: ContextVar[tuple[_Block, ...]] = ContextVar("atoll_open_annotations", default=())


class Scope:
    """A strategy that has not been applied yet: enter it with `with`, or hand it to `default`."""

    def __init__(self, kind: Kind, where: str, *, devices: int = 0, micro_batches: int = 0, uneven: bool = True) -> None:
        self._strategy = Annotation(kind=kind, devices=devices, micro_batches=micro_batches, uneven=uneven, where=where)

    def __repr__(self) -> str:
        return f"<atoll.{self._strategy.kind} of {self._strategy.where}>"

    def annotation(self, *, is_default: bool = False) -> Annotation:
        """A new annotation with this strategy, made in the innermost open block."""
        around = _open.get()
        parent = around[-1].annotation.id if around else ""
        made = time.monotonic_ns()
        return msgspec.structs.replace(self._strategy, id=uuid.uuid4().hex, parent=parent, made=made, is_default=is_default)

    def __enter__(self) -> Annotation:
        _watch_construction()
        annotation = self.annotation()
        _open.set((*_open.get(), _Block(annotation)))
        return annotation

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        *around, block = _open.get()
        _open.set(tuple(around))
        if kind is None and not block.built:
            what = f"{self._strategy.where}: {self._strategy.kind}"
            raise AnnotationError(f"{what}: no module was built or attached inside this block; build them inside, or remove the block")


@cache
def _watch_construction() -> None:
    """Set torch's registration hooks, once per process."""
    register_module_parameter_registration_hook(_on_parameter)
    register_module_module_registration_hook(_on_module)


def _on_parameter(module: nn.Module, _name: str, _parameter: Any) -> None:
    _mark_built((module,))


def _on_module(_parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    if child is not None and _open.get():
        _mark_built(child.modules())


def _mark_built(modules: Iterable[nn.Module]) -> None:
    """Put the annotations of all open blocks on these modules."""
    blocks = _open.get()
    if not blocks:
        return
    for module in modules:
        for block in blocks:
            block.built = True
            _mark(module, block.annotation)


def _mark(module: nn.Module, annotation: Annotation) -> None:
    marks: tuple[Annotation, ...] = module.__dict__.get(_MARKS, ())
    if all(mark.id != annotation.id for mark in marks):
        module.__dict__[_MARKS] = (*marks, annotation)


@overload
def replica(devices: int, /) -> Scope: ...
@overload
def replica(*, devices: int = 0) -> Scope: ...
@overload
def replica(module: _Module, devices: int = 0) -> _Module: ...
def replica(module: nn.Module | int | None = None, devices: int = 0) -> nn.Module | Scope:
    """This part is copied to `devices` devices, each taking its share of the batch. 0: as many as the planner likes."""
    return _applied("replica", module, devices)


@overload
def split(devices: int, /, *, uneven: bool = True) -> Scope: ...
@overload
def split(*, devices: int = 0, uneven: bool = True) -> Scope: ...
@overload
def split(module: _Module, devices: int = 0, *, uneven: bool = True) -> _Module: ...
def split(module: nn.Module | int | None = None, devices: int = 0, *, uneven: bool = True) -> nn.Module | Scope:
    """This part's tensors (or experts) are divided over `devices` devices; without `uneven` only in equal parts. 0: free, at least 2."""
    return _applied("split", module, devices, uneven=uneven)


@overload
def stage() -> Scope: ...
@overload
def stage(module: _Module) -> _Module: ...
def stage(module: nn.Module | None = None) -> nn.Module | Scope:
    """This part is one pipeline stage. Stages are written in the order they run."""
    return _applied("stage", module, 0)


@overload
def pipeline(*, micro_batches: int = 0) -> Scope: ...
@overload
def pipeline(module: _Module, *, micro_batches: int = 0) -> _Module: ...
def pipeline(module: nn.Module | None = None, *, micro_batches: int = 0) -> nn.Module | Scope:
    """The stages inside run as a pipeline of `micro_batches` (0: free); without stages inside, the planner cuts it."""
    return _applied("pipeline", module, 0, micro_batches=micro_batches)


def default(model: _Module, strategy: Scope) -> _Module:
    """Give every layer of `model` that has neither replica nor split this strategy, a `replica(…)` or a `split(…)`."""
    where = _caller(2)
    if not isinstance(strategy, Scope):
        raise AnnotationError(f"{where}: default: the strategy must be atoll.replica(…) or atoll.split(…), got {strategy!r}")
    annotation = strategy.annotation(is_default=True)
    if annotation.kind not in ("replica", "split"):
        raise AnnotationError(f"{where}: default: {annotation.kind} cannot be a default; use atoll.replica(…) or atoll.split(…)")
    for module in model.modules():
        _mark(module, annotation)
    return model


def _applied(kind: Kind, target: nn.Module | int | None, devices: int, *, micro_batches: int = 0, uneven: bool = True) -> nn.Module | Scope:
    """A scope to enter, or the module with the annotation (and those of the open blocks) on it."""
    where = _caller(3)
    if isinstance(target, int) and kind in ("replica", "split"):
        devices, target = target, None
    if target is not None and not isinstance(target, nn.Module):
        raise AnnotationError(f"{where}: {kind}: expected a torch.nn.Module, got {type(target).__name__}")
    _check_count(where, kind, "devices", devices)
    _check_count(where, kind, "micro_batches", micro_batches)
    scope = Scope(kind, where, devices=devices, micro_batches=micro_batches, uneven=uneven)
    if target is None:
        return scope
    _mark_built(target.modules())
    annotation = scope.annotation()
    for module in target.modules():
        _mark(module, annotation)
    return target


def _check_count(where: str, kind: Kind, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise AnnotationError(f"{where}: {kind}: {name} must be a whole number (0 or nothing: free), got {value!r}")


def _caller(depth: int) -> str:
    """`"train.py:12"`: the user's line, `depth` calls up; the path is relative where that is shorter to read."""
    frame = sys._getframe(depth)
    path = frame.f_code.co_filename
    inside = os.path.isabs(path) and path.startswith(os.getcwd() + os.sep)
    return f"{os.path.relpath(path) if inside else os.path.basename(path)}:{frame.f_lineno}"


def annotations_of(model: nn.Module) -> list[Annotation]:
    """The annotations on a model's modules in the order they were made, each with the paths (as in `named_modules`) it covers.

    A module that hangs in several places (an embedding that encoder and decoder share) is listed in `shared` and counts for the first
    annotation of each kind that covers it; `resolve` lets other modules decide where there are any, so that annotating encoder and
    decoder is no contradiction.
    """
    paths: dict[int, tuple[nn.Module, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), (module, []))[1].append(path)
    found: dict[str, Annotation] = {}
    covered: dict[str, set[str]] = {}
    shared: dict[str, set[str]] = {}
    for module, places in paths.values():
        several = len(places) > 1
        for mark in _marks_that_count(module, first_only=several):
            found.setdefault(mark.id, mark)
            covered.setdefault(mark.id, set()).update(places)
            shared.setdefault(mark.id, set()).update(places if several else ())
    listed = sorted(found.values(), key=lambda mark: mark.made)
    return [msgspec.structs.replace(a, modules=frozenset(covered[a.id]), shared=frozenset(shared[a.id])) for a in listed]


def _marks_that_count(module: nn.Module, *, first_only: bool) -> list[Annotation]:
    marks: tuple[Annotation, ...] = module.__dict__.get(_MARKS, ())
    if not first_only:
        return list(marks)
    first: dict[tuple[Kind, bool], Annotation] = {}
    for mark in sorted(marks, key=lambda mark: mark.made):
        first.setdefault((mark.kind, mark.is_default), mark)
    return list(first.values())
