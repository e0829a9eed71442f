"""Random numbers that a model draws in Python: refused with the line, unless they decide nothing; SpecAugment is an operator."""

import random
from typing import Any

import numpy
import pytest
import torch
from captured_models import TinyJob
from torch import Tensor, nn

from atoll.errors import CaptureError
from atoll.graph.capture import capture_program
from atoll.graph.host_randomness import extreme_draws

WIDTH = 8
OWN = numpy.random.default_rng(3)


class NoisyIdentity(torch.autograd.Function):
    """Draws inside of what is one node of the program."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Kept:
    mean = torch.zeros(WIDTH)


class Drawing(nn.Module):
    """Two layers; a random number says whether the second is used, or by how much."""

    def __init__(self, kind: str, probability: float = 0.05) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.probability = kind, probability
        self.generator, self.calls, self.kept = random.Random(5), 0, Kept()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "branch" and random.random() < self.probability:
            return x
        if self.kind == "numpy branch" and numpy.random.uniform(0, 1) < self.probability:
            return x
        if self.kind == "own generator" and self.generator.random() < self.probability:
            return x
        if self.kind == "torch branch" and torch.rand([]) < self.probability:
            return x
        if self.kind == "item" and torch.rand(()).item() < self.probability:
            return x
        if self.kind == "constant":
            x = x * torch.tensor(numpy.random.rand(WIDTH), dtype=x.dtype)
        if self.kind == "own generator of NumPy":
            x = x * float(OWN.normal())
        if self.kind == "entropy":
            x = x * float(numpy.random.default_rng().uniform(0.5, 2.0))
        if self.kind == "custom function":
            x = NoisyIdentity.apply(x)  # type: ignore[no-untyped-call]
        if self.kind == "count":
            self.calls += 1
            x = x * (1 + self.calls / 1000)
        if self.kind == "late count":
            self.calls += 1
            x = x * (2 if self.calls > 1000 else 1)
        if self.kind == "kept tensor":
            x = x + self.kept.mean
            self.kept.mean = x.detach().mean(0)
        if self.kind == "seeded":
            numpy.random.seed(3)
            x = x * float(numpy.random.randn())
        return self.second(x)


def job_of(kind: str, **given: Any) -> TinyJob:
    return TinyJob("tiny", lambda: Drawing(kind, **given), lambda model, batch: model(batch).square().mean(), vectors)


def vectors(samples: int) -> Tensor:
    return torch.randn(samples, WIDTH)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("branch", "random.random() < self.probability"),
        ("numpy branch", "numpy.random.uniform(0, 1) < self.probability"),
        ("own generator", "self.generator.random() < self.probability"),
        ("constant", "torch.tensor(numpy.random.rand(WIDTH)"),
        ("own generator of NumPy", "float(OWN.normal())"),
        ("torch branch", "test_host_randomness.py:"),
        ("item", "test_host_randomness.py:"),
        ("custom function", "'NoisyIdentity' draws random numbers"),
        ("entropy", "called again with the same weights, batch and seed"),
        ("count", "called again with the same weights, batch and seed"),
        ("late count", "every call of its code changes 'calls'"),
        ("kept tensor", "called again with the same weights, batch and seed"),
    ],
)
def test_a_number_drawn_in_python_is_refused_with_its_line(kind: str, line: str) -> None:
    with pytest.raises(CaptureError) as error:
        capture_program(job_of(kind, probability=0.05), check=True)
    assert line in str(error.value)


@pytest.mark.parametrize("kind", ["branch", "numpy branch", "torch branch", "seeded"])
def test_what_is_drawn_and_decides_nothing_is_captured(kind: str) -> None:
    assert len(capture_program(job_of(kind, probability=0.0), check=True).graph.layers) >= 2


def test_capture_leaves_the_generators_as_they_were() -> None:
    random.seed(1)
    numpy.random.seed(1)
    expected = random.Random(1).random(), numpy.random.RandomState(1).rand()
    with pytest.raises(CaptureError):
        capture_program(job_of("branch"))
    assert (random.random(), numpy.random.rand()) == expected


def test_extreme_draws_are_at_the_ends_of_the_range() -> None:
    for high in (False, True):
        with extreme_draws(high=high):
            numbers = [random.random() for _ in range(200)] + list(numpy.random.rand(200))
        assert all(number > 0.999999 if high else number < 1e-6 for number in numbers)
