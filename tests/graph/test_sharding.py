"""What sharding says of small layers: how parameters are cut, what shared ones do, and what is refused."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from captured_models import TinyJob
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention

from atoll.graph.capture import Captured, capture_program
from atoll.graph.sharding_rewrites import ByDepth, Cut, DivideLoss, Lookup, Operand, Scale, deal
from atoll.plan.division import unit_runs

CLASSES = 96


def numbers(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, CLASSES, (samples, 5)), torch.randint(0, CLASSES, (samples, 5))


def vectors(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 5, 16), torch.randint(0, CLASSES, (samples, 5))


def entropy(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def squares(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0]).square().mean()


def captured(model: Callable[[], nn.Module], loss: Any, batch: Any) -> Captured:
    return capture_program(TinyJob("job", model, loss, batch))


def cuts(program: Captured) -> dict[str, Cut]:
    return {one.name: one.cut for sharding in program.shardings for one in sharding.divided.values()}


shares = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@given(shares, st.integers(0, 300))
def test_units_are_dealt_out_in_proportion(proportion: tuple[int, ...], more: int) -> None:
    units = len(proportion) + more
    counts = deal(units, proportion)
    assert sum(counts) == units
    assert min(counts) >= 1
    for count, share in zip(counts, proportion, strict=True):
        exact = units * share / sum(proportion)
        assert abs(count - exact) < 1 or count == 1 or exact > count  # only the least devices' first unit costs others more


@given(shares, st.integers(1, 20))
def test_whole_units_are_dealt_out_as_plans_say(proportion: tuple[int, ...], times: int) -> None:
    units = sum(proportion) * times
    assert deal(units, proportion) == tuple(len(run) for run in unit_runs(units, len(proportion), proportion))


@given(shares, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 10))
def test_parts_hold_everything_once(proportion: tuple[int, ...], blocks: list[int], more: int) -> None:
    units = len(proportion) + more
    cut = Cut(0, tuple(block * units for block in blocks), units)
    parts = [cut.parts(proportion, index) for index in range(len(proportion))]
    held = sorted(number for ranges in parts for start, stop in ranges for number in range(start, stop))
    assert held == list(range(cut.size))
    assert all(a[1] <= b[0] for ranges in parts for a, b in pairwise(ranges))


class Attention(nn.Module):
    """Query, key and value in one product, taken apart as `how` says; key and value have two heads, query four."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.fused, self.out = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.fused(x)
        if self.how == "split":
            query, key, value = made.split([16, 8, 8], -1)
        elif self.how == "slices":
            query, key, value = made[..., :16], made[..., 16:24], made[..., -8:]
        else:
            query, rest = made.split([16, 16], -1)
            key, value = rest.chunk(2, -1)
        heads = [part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (query, key, value)]
        return x + self.out(scaled_dot_product_attention(*heads, enable_gqa=True).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("how", ["split", "slices", "nested"])
def test_each_of_fused_projections_is_divided_by_itself(how: str) -> None:
    program = captured(lambda: Stack(lambda: Attention(how)), squares, vectors)
    found = cuts(program)
    assert found["blocks.0.fused.weight"] == Cut(0, (16, 8, 8), 2)
    assert found["blocks.1.fused.bias"] == Cut(0, (16, 8, 8), 2)
    assert found["blocks.0.out.weight"] == Cut(1, (16,), 2)
    assert "blocks.0.out.bias" not in found
    assert [layer.tensor_units for layer in program.graph.layers] == [2, 2]


class Tied(nn.Module):
    """One table, looked up and multiplied by; `spoil` uses it in a way that no rule divides."""

    def __init__(self, spoil: bool) -> None:
        super().__init__()
        self.spoil = spoil
        self.table = nn.Embedding(CLASSES, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = hidden @ self.table.weight.T
        return logits.flip(-1) if self.spoil else logits


@pytest.mark.parametrize("spoil", [False, True])
def test_a_shared_table_is_divided_in_every_layer_or_in_none(spoil: bool) -> None:
    program = captured(lambda: Tied(spoil), entropy, numbers)
    divided = [any(isinstance(one, (Lookup, DivideLoss)) for one in sharding.rewrites) for sharding in program.shardings]
    assert divided == [not spoil, False, False, not spoil]
    assert cuts(program) == ({} if spoil else {"table.weight": Cut(0, (CLASSES,), CLASSES)})
    assert [layer.tensor_reductions for layer in program.graph.layers] == ([0] * 4 if spoil else [1, 0, 0, 2])


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(CLASSES, 16))

    def forward(self, x: Tensor) -> Tensor:
        return embedding(x, self.table) @ self.table.T


def test_a_table_shared_within_a_layer_is_divided_once() -> None:
    (sharding,) = captured(OneLayer, entropy, numbers).shardings
    assert [type(one) for one in sharding.rewrites if not isinstance(one, (Operand, Scale))] == [Lookup, DivideLoss]
    assert [one.cut for one in sharding.divided.values()] == [Cut(0, (CLASSES,), CLASSES)]


class OverSamples(nn.Module):
    """Mixes samples between its two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).softmax(0))


def test_lanes_are_refused_where_samples_mix() -> None:
    program = captured(lambda: Stack(OverSamples), squares, vectors)
    for sharding in program.shardings:
        assert any(isinstance(one, ByDepth) for one in sharding.rewrites)
        assert "softmax" in sharding.gathering.refused


def test_lanes_gather_along_the_samples() -> None:
    program = captured(lambda: Stack(lambda: Attention("split")), squares, vectors)
    for sharding in program.shardings:
        assert not sharding.gathering.refused
        assert set(sharding.gathering.samples.values()) == {(0, 1)}


class Drawn(nn.Module):
    """Draws numbers in a way that cannot be done in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.noise = nn.Linear(16, 24), nn.Linear(24, 16), nn.FeatureAlphaDropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.noise(self.first(x)))


def test_what_no_rule_divides_stays_whole() -> None:
    program = captured(lambda: Stack(Drawn), squares, vectors)
    assert all(not sharding.divided and not sharding.rewrites and not sharding.parameters for sharding in program.shardings)
    assert [layer.tensor_units for layer in program.graph.layers] == [1, 1]
