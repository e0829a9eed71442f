"""The outer update against plain numbers in NumPy's float64, and what must hold of it whatever the numbers are."""

from typing import Any

import numpy as np
import pytest
import torch

from atoll.codec.registry import decode, make_codec
from atoll.errors import AtollError
from atoll.runtime.outer_update import Border, OuterState, OuterTerms, carry_over, outer_step, reach_border, weighted_mean

SIZE = 600
LINEAR, TARGETS = (torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64) for shape in ((64, SIZE), (64,)))


def gradient(weights: Any, rows: slice) -> Any:
    """Of the squared error of a linear model over some samples: their mean; of tensors or NumPy's arrays."""
    inputs, targets = (LINEAR[rows], TARGETS[rows]) if isinstance(weights, torch.Tensor) else (LINEAR[rows].numpy(), TARGETS[rows].numpy())
    return inputs.T @ (inputs @ weights - targets) / len(targets)


class Site:
    """A site with plain SGD inside."""

    def __init__(self, state: OuterState, rows: slice) -> None:
        self.state = OuterState(*(each.clone() for each in state))
        self.weights = state.weights.clone()
        self.residual: torch.Tensor | None = None
        self.rows, self.border = rows, None

    def train(self, steps: int, rate: float = 1e-3) -> None:
        for _ in range(steps):
            self.weights = self.weights - rate * gradient(self.weights.double(), self.rows).to(self.weights.dtype)

    def send(self, codec: str, terms: OuterTerms) -> Border:
        return reach_border(self.state, self.weights, self.residual, make_codec(codec), terms.feedback)

    def finish(self, border: Border, updates: list[tuple[float, torch.Tensor]], terms: OuterTerms, named: bool = True) -> None:
        base = border.sent if named else self.state.weights.clone()
        if named:
            self.residual = border.residual
        self.state = outer_step(self.state, weighted_mean(updates), terms)
        self.weights = carry_over(self.state, self.weights, base)


def two_sites(dtype: torch.dtype = torch.float32) -> tuple[Site, Site]:
    beginning = OuterState.beginning(torch.randn(SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype))
    return Site(beginning, slice(0, 48)), Site(beginning, slice(48, 64))


def play(
    terms: OuterTerms, rounds: int, inner: int, delay: int, codec: str = "none", dtype: torch.dtype = torch.float32
) -> tuple[Site, Site]:
    sites = two_sites(dtype)
    for _ in range(rounds):
        for site in sites:
            site.train(inner - delay)
        borders = [site.send(codec, terms) for site in sites]
        for site in sites:
            site.train(delay)
        updates = [(float(weight), decode(border.update)) for weight, border in zip((48, 16), borders, strict=True)]
        for site, border in zip(sites, borders, strict=True):
            site.finish(border, updates, terms)
    return sites


def reference(terms: OuterTerms, rounds: int, inner: int, delay: int) -> tuple[Any, list[Any]]:
    """(g, each site's θ), in float64 from the formula as it is written, without a codec."""
    g = torch.randn(SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64).numpy()
    b, thetas, samples, weights = np.zeros(SIZE), [g.copy(), g.copy()], (slice(0, 48), slice(48, 64)), (48, 16)
    for _ in range(rounds):
        sent = []
        for site, rows in enumerate(samples):
            for _ in range(inner - delay):
                thetas[site] = thetas[site] - 1e-3 * gradient(thetas[site], rows)
            sent.append(thetas[site])
            for _ in range(delay):
                thetas[site] = thetas[site] - 1e-3 * gradient(thetas[site], rows)
        mean = sum(weight * (g - theta) for weight, theta in zip(weights, sent, strict=True)) / sum(weights)
        b = terms.momentum * b + mean
        g = g - terms.learning_rate * (mean + terms.momentum * b)
        thetas = [g + (now - theta) for now, theta in zip(thetas, sent, strict=True)]
    return g, thetas


@pytest.mark.parametrize(
    ("terms", "inner", "delay"),
    [
        (OuterTerms(), 1, 0),
        (OuterTerms(learning_rate=0.7, momentum=0.9), 5, 0),
        (OuterTerms(learning_rate=0.9, momentum=0.5), 5, 3),
        (OuterTerms(), 2, 1),
    ],
)
def test_it_is_the_formula(terms: OuterTerms, inner: int, delay: int) -> None:
    expected, thetas = reference(terms, 12, inner, delay)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        for site, theta in zip(play(terms, 12, inner, delay, dtype=dtype), thetas, strict=True):
            assert np.allclose(site.state.weights.numpy(), expected, rtol=tolerance, atol=tolerance)
            assert np.allclose(site.weights.numpy(), theta, rtol=tolerance, atol=tolerance)


def test_a_step_a_round_is_synchronous_training_on_all_samples() -> None:
    weights = two_sites()[0].weights
    for _ in range(30):
        weights = weights - 1e-3 * gradient(weights.double(), slice(0, 64)).float()
    for site in play(OuterTerms(), 30, 1, 0):
        assert float((site.weights - weights).norm() / weights.norm()) < 1e-6
        assert torch.equal(site.weights, site.state.weights)


@pytest.mark.parametrize("codec", ["none", "int8", "int4", "2-bit", "top-k-2-bit:64"])
@pytest.mark.parametrize("delay", [0, 2])
def test_all_sites_have_the_same_state_to_the_bit(codec: str, delay: int) -> None:
    first, second = play(OuterTerms(learning_rate=0.7, momentum=0.9, feedback=0.95), 8, 3, delay, codec)
    assert first.state.weights.numpy().tobytes() == second.state.weights.numpy().tobytes()
    assert first.state.momentum.numpy().tobytes() == second.state.momentum.numpy().tobytes()
    if delay == 0:
        assert torch.equal(first.weights, first.state.weights)  # no progress since: θ is g, bit for bit


@pytest.mark.parametrize("codec", ["int8", "int4", "2-bit", "top-k-2-bit:300"])
@pytest.mark.parametrize("feedback", [0.5, 0.95, 1.0])
def test_what_arrives_and_what_is_owed_is_what_was_to_be_sent_and_debts_stay_bounded(codec: str, feedback: float) -> None:
    generator = torch.Generator().manual_seed(5)
    state, residual = OuterState.beginning(torch.zeros(SIZE)), None
    largest = []
    for _ in range(30):
        weights = torch.randn(SIZE, generator=generator)
        border = reach_border(state, weights, residual, make_codec(codec), feedback)
        owed = torch.zeros(SIZE) if residual is None else residual
        assert torch.allclose(decode(border.update) + border.residual, feedback * owed - weights, atol=1e-5)
        residual = border.residual
        largest.append(float(residual.norm()) / SIZE**0.5)
    assert max(largest) < 3.0  # times what a round adds; without bounds it would be over 5 by then


def test_an_update_that_was_left_out_is_sent_with_the_next_one_once() -> None:
    terms = OuterTerms()
    first, second = two_sites(torch.float64)
    first.train(2)
    second.train(2)
    begun = first.state.weights.clone()
    progress = first.weights - begun
    border, other = first.send("none", terms), second.send("none", terms)
    first.train(1)
    meanwhile = first.weights - border.sent
    first.finish(border, [(16.0, decode(other.update))], terms, named=False)
    assert torch.allclose(first.weights - first.state.weights, progress + meanwhile, atol=1e-12)
    again = first.send("none", terms)
    assert torch.allclose(decode(again.update), -(progress + meanwhile), atol=1e-12)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_weights_that_have_no_mean_are_refused(weights: list[float]) -> None:
    with pytest.raises(AtollError, match="no mean"):
        weighted_mean([(weight, torch.ones(3)) for weight in weights])


def test_updates_of_other_shapes_are_refused() -> None:
    with pytest.raises(AtollError, match="cannot be added"):
        weighted_mean([(1.0, torch.ones(3)), (1.0, torch.ones(4))])


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 0.0), ("momentum", 1.0), ("feedback", 1.5), ("learning_rate", float("nan"))])
def test_terms_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(AtollError, match=r"outer|error feedback"):
        OuterTerms(**{name: value})
