"""Random numbers of Python and NumPy in a forward: capture would freeze them, otherwise in every process.

A program holds PyTorch's random operators and draws anew whenever it runs. What the model's Python code draws for itself it does not hold:
the number, or the branch that it decided, would be a constant. So the generators are watched while a model is captured, and a model that
moved one is captured again from another state: only if that makes no difference (layer drop of probability 0) is the program right.
"""

import contextlib
import itertools
import linecache
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FrameType
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn
from torch.export import ExportedProgram

from atoll.randomness import own_randomness

__all__ = ["DrawingLine", "Generator", "GeneratorWatch", "extreme_draws", "only_global", "same_program"]

Generator: TypeAlias = random.Random | numpy.random.RandomState | numpy.random.Generator

_WORDS = 624  # of a Mersenne Twister's state; both global generators are one


def _global_generators() -> list[Generator]:
    return [random.getstate.__self__, numpy.random.mtrand._rand]  # type: ignore[attr-defined]


class GeneratorWatch:
    """Which generators of Python and NumPy move after it was made: the global ones, and the user's own objects within reach.

    Those are attributes of the model's modules, and globals of the files that define them and the loss, and what the loss closes over.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        found = {id(generator): generator for generator in [*_global_generators(), *_within_reach(model, loss)]}
        self._before = [(generator, _state(generator)) for generator in found.values()]

    def moved(self) -> list[Generator]:
        """Those that have drawn, or were seeded, since."""
        return [generator for generator, before in self._before if _state(generator) != before]


def only_global(generators: list[Generator]) -> bool:
    """Whether `extreme_draws` governs them all."""
    known = {id(generator) for generator in _global_generators()}
    return all(id(generator) in known for generator in generators)


def _within_reach(model: nn.Module, loss: Any) -> list[Generator]:
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    places = [vars(module) for module in model.modules()] + [vars(sys.modules[name]) for name in names if name in sys.modules]
    closed = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or () if cell != CellType()]
    values = itertools.chain(closed, getattr(loss, "__globals__", {}).values(), *(place.values() for place in places))
    kinds = (random.Random, numpy.random.RandomState, numpy.random.Generator)
    return [value for value in values if isinstance(value, kinds) and not isinstance(value, random.SystemRandom)]


def _state(generator: Generator) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return _comparable(generator.bit_generator.state)
    return _comparable(generator.get_state(legacy=False))


def _comparable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((key, _comparable(inner)) for key, inner in value.items())
    return value.tobytes() if isinstance(value, numpy.ndarray) else value


@contextlib.contextmanager
def extreme_draws(*, high: bool) -> Iterator[None]:
    """While it is on, Python's and NumPy's generators begin with hundreds of numbers near 1, or of zeros; then they go on as usual.

    Whatever the probability of a branch that compares such a number with it, one of the two takes it and the other does not.
    """
    word = _untempered(0xFFFFFFFF if high else 1)
    with own_randomness(devices=False):
        random.setstate((3, (*[word] * _WORDS, 0), None))
        numpy.random.set_state(("MT19937", numpy.full(_WORDS, word, dtype=numpy.uint32), 0, 0, 0.0))
        yield


def _untempered(drawn: int) -> int:
    """The word of a Mersenne Twister's state that is drawn as this one: its tempering (Matsumoto and Nishimura, 1998) undone."""
    word = drawn ^ (drawn >> 18)
    word ^= (word << 15) & 0xEFC60000
    turned = word
    for _ in range(5):
        turned = word ^ ((turned << 7) & 0x9D2C5680)
    word = turned
    for _ in range(3):
        word = turned ^ (word >> 11)
    return word & 0xFFFFFFFF


def same_program(one: ExportedProgram, other: ExportedProgram) -> bool:
    """Whether both compute the same: operators, and the constants among what they read."""
    codes = [program.graph_module.print_readable(print_output=False) for program in (one, other)]
    if codes[0] != codes[1] or one.constants.keys() != other.constants.keys():
        return False
    pairs = [(one.constants[name], other.constants[name]) for name in one.constants]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


def _is_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARIES)) or (file.startswith(_STANDARD) and "site-packages" not in file)


_LIBRARIES = tuple(os.path.dirname(file or "") + "/" for file in (torch.__file__, numpy.__file__, os.path.dirname(__file__)))  # and Atoll
_STANDARD = os.path.dirname(random.__file__) + "/"


class DrawingLine:
    """While it is on, notes the line of the model's own code during which a generator first moved."""

    def __init__(self, watch: Callable[[], GeneratorWatch]) -> None:
        self._make = watch
        self._found: tuple[str, int] | None = None
        self._last: tuple[str, int] | None = None

    def __enter__(self) -> None:
        self._watch, self._before = self._make(), sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        self._look()

    def __str__(self) -> str:
        if self._found is None:
            return "the model's code"
        file, line = self._found
        return f"{os.path.basename(file)}:{line} (`{linecache.getline(file, line).strip()}`)"

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._found is not None or _is_library(frame.f_code.co_filename):
            return None
        self._look()
        self._last = frame.f_code.co_filename, frame.f_lineno
        return self._trace

    def _look(self) -> None:
        if self._found is None and self._last is not None and self._watch.moved():
            self._found = self._last
