"""Who holds which units of a divided layer."""

from itertools import pairwise
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import PlanError
from atoll.graph import Graph, Layer, preset
from atoll.plan import parse_plan, part_of, unit_runs, validate
from atoll.plan.division import even_shares
from tests.plan.strategies import make_cluster


@given(st.lists(st.integers(2, 60), min_size=1, max_size=3), st.integers(2, 9))
def test_even_shares_are_the_most_equal_that_deal_out_whole_units(units: list[int], tensor: int) -> None:
    shares = even_shares(units, tensor)
    if shares is None:
        assert gcd(*units) < tensor
        return
    assert (shares == ()) == all(number % tensor == 0 for number in units)
    for number in units:
        sizes = [len(run) for run in unit_runs(number, tensor, shares)]
        assert sum(sizes) == number
        assert min(sizes) >= 1
    common = [len(run) for run in unit_runs(gcd(*units), tensor, shares)]
    assert max(common) - min(common) <= 1


@given(st.integers(1, 40), st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 50_000))
def test_runs_of_units_cover_every_dimension_once(multiple: int, shares: list[int], size: int) -> None:
    units = multiple * sum(shares)
    runs = unit_runs(units, len(shares), tuple(shares))
    assert [unit for run in runs for unit in run] == list(range(units))
    parts = [part_of(size, units, run) for run in runs]
    assert parts[0].start == 0
    assert parts[-1].stop == size
    assert all(a.stop == b.start for a, b in pairwise(parts))


def test_heads_and_columns_go_together() -> None:
    first, second = unit_runs(25, 2, (13, 12))
    assert (first, second) == (range(13), range(13, 25))
    assert part_of(6400, 25, second) == range(13 * 256, 6400)
    assert len(part_of(50257, 25, first)) + len(part_of(50257, 25, second)) == 50257


PLAN = "plan v1 graph=gpt2-xl cluster=c batch=8 micro_batch=8\nstage 0: layers 0-49 tensor=2: 2x(s0-0/[0-3])=4"


def test_a_tensor_split_that_does_not_divide_needs_shares() -> None:
    graph, cluster = preset("gpt2-xl").graph, make_cluster(1, 4)
    with pytest.raises(PlanError) as caught:
        validate(parse_plan(PLAN), graph, cluster)
    said = str(caught.value)
    assert "stage 0, replica 0: tensor=2 in equal shares does not divide the 25 units of layer 'embedding' into whole ones" in said
    assert "as @13:12 does" in said
    assert "▶equal◀" in said
    validate(parse_plan(f"{PLAN}@13:12"), graph, cluster)
    validate(parse_plan(f"{PLAN}@4:1"), graph, cluster)
    with pytest.raises(PlanError, match=r"(?s)tensor shares 3:1 do not divide the 25 units of layer 'embedding'.*▶3:1◀") as caught:
        validate(parse_plan(f"{PLAN}@3:1".replace("2x(s0-0/[0-3])=4", "s0-0/[0-1]=4@13:12 s0-0/[2-3]=4")), graph, cluster)
    assert "replica 1" in str(caught.value)


def test_layers_with_nothing_in_common_cannot_be_split_in_one_stage() -> None:
    graph = Graph.from_layers("gpt2-xl", [Layer(name=f"h.{i}", tensor_units=units) for i, units in enumerate((25, 1, 16))])
    with pytest.raises(PlanError, match="nothing divides 16 and 25 alike into 2: cut the stage between such layers"):
        validate(parse_plan(PLAN.replace("0-49", "0-2")), graph, make_cluster(1, 4))
