"""Plans: cells cover everything once, chunks cover cells, and nonsense is refused."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import FabricError
from atoll.fabric.collective import Cell, Network, PeerRates, RoundMember, RoundPlan, equal_network, make_plan

FEW = settings(max_examples=settings().max_examples // 3)


@st.composite
def plans(draw: st.DrawFn) -> RoundPlan:
    count = draw(st.integers(1, 7))
    rates = draw(st.lists(st.sampled_from([1e5, 1e6, 1e7]), min_size=count, max_size=count))
    peers = tuple(PeerRates(name=f"p{i}", up_bytes_per_s=rate, down_bytes_per_s=rate) for i, rate in enumerate(rates))
    weights = draw(st.lists(st.sampled_from([1.0, 2.5, None]), min_size=count, max_size=count))
    members = [RoundMember(name=f"p{i}", weight=1.0 if i == 0 else weight) for i, weight in enumerate(weights)]
    return make_plan(
        "r", draw(st.integers(0, 3_000_000)), members, Network(peers=peers), chunk_elements=draw(st.sampled_from([None, 256, 4096]))
    )


@FEW
@given(plans())
def test_every_value_is_in_one_chunk(plan: RoundPlan) -> None:
    edge = 0
    for cell in plan.cells:
        assert cell.start == edge
        for start, stop in plan.chunks(cell):
            assert edge == start < stop <= start + plan.chunk_elements
            edge = stop
    assert edge == plan.elements


@FEW
@given(plans())
def test_plans_travel(plan: RoundPlan) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=RoundPlan) == plan


def test_nonsense_is_refused() -> None:
    plan = make_plan("r", 1000, [RoundMember(name="a"), RoundMember(name="b")], equal_network(["a", "b"]))
    for change in (
        {"elements": 999},
        {"members": (RoundMember(name="a", weight=None), RoundMember(name="b", weight=None))},
        {"members": (RoundMember(name="a", weight=-1.0), RoundMember(name="b"))},
        {"cells": (Cell(start=0, stop=1000, owner="c"),)},
        {"chunk_elements": 100},
        {"stall_seconds": 0.0},
    ):
        with pytest.raises((FabricError, msgspec.ValidationError), match="round r"):
            msgspec.structs.replace(plan, **change)
    with pytest.raises(FabricError, match="rates are known of a, b"):
        make_plan("r", 1000, [RoundMember(name="a")], equal_network(["a", "b"]))
