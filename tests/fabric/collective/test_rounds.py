"""Reductions under random schedules of deaths, standstills and cuts: nobody hangs, and no sum is ever other than what it says it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import CollectiveError
from atoll.fabric.collective import ReductionResult, RoundMember, RoundPlan, equal_network, make_plan
from atoll.fabric.collective.plan import Missing
from tests.fabric.collective.simulated import Fault, run_round, run_virtually

EXAMPLES = settings().max_examples  # of the profile
NAMES = ["a", "b", "c", "d", "e"]


def plan_of(weights: list[float | None], elements: int, missing: Missing = "leave out", mean: bool = False) -> RoundPlan:
    names = NAMES[: len(weights)]
    members = [RoundMember(name=name, weight=weight) for name, weight in zip(names, weights, strict=True)]
    return make_plan("r", elements, members, equal_network(names, 1e6), missing=missing, mean=mean, chunk_elements=512, begin_seconds=3.0)


def contributions(plan: RoundPlan, seed: int) -> dict[str, torch.Tensor]:
    """Whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-1000, 1000, (plan.elements,), generator=generator).float() for name in plan.contributors}


def check(plan: RoundPlan, buffers: dict[str, torch.Tensor], result: ReductionResult) -> None:
    """Every part is exactly the sum of the contributions it names, and parts cover everything."""
    edge = 0
    for part in result.parts:
        assert part.start == edge
        edge = part.stop
        if not part.contributors:
            assert part.blamed
            assert not result.value[part.start : part.stop].any()
            continue
        weights = {name: plan.member(name).weight or 0.0 for name in part.contributors}
        expected = sum(
            (buffers[name][part.start : part.stop] * weight for name, weight in weights.items()), torch.zeros(part.stop - part.start)
        )
        if plan.mean and sum(weights.values()):
            expected = expected / sum(weights.values())
        assert torch.equal(result.value[part.start : part.stop], expected)
    assert edge == plan.elements


@st.composite
def plans(draw: st.DrawFn, missing: Missing = "leave out") -> RoundPlan:
    count = draw(st.integers(2, 5))
    weights = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 0.0, None]), min_size=count, max_size=count))
    weights[0] = weights[0] or 1.0
    return plan_of(weights, draw(st.sampled_from([1, 700, 5000])), missing, draw(st.booleans()))


def faults_of(draw: st.DrawFn, plan: RoundPlan) -> list[Fault]:
    names = [member.name for member in plan.members]
    found: list[Fault] = []
    for _ in range(draw(st.integers(0, 3))):
        what = draw(st.sampled_from(["kill", "kill", "stop", "cut"]))
        pair = draw(st.permutations(names))[:2]
        found.append((draw(st.floats(0, 4)), what, " ".join(pair) if what == "cut" else pair[0]))
    return found


@given(plans(), st.integers(0, 2**32))
@settings(max_examples=EXAMPLES // 3)
def test_without_faults_everybody_gets_the_whole_sum(plan: RoundPlan, seed: int) -> None:
    buffers = contributions(plan, seed)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    results = run_virtually(run_round(plan, buffers, seed, []))
    assert set(results) == {member.name for member in plan.members}
    assert all(torch.equal(buffers[name], before[name]) for name in buffers), "contributions are never written to"
    for result in results.values():
        check(plan, buffers, result)
        assert result.complete
        assert not result.blamed
    assert len({result.digest for result in results.values()}) == 1


@given(st.data(), st.integers(0, 2**32))
def test_whatever_happens_sums_are_what_they_say(data: st.DataObject, seed: int) -> None:
    plan = data.draw(plans())
    faults = faults_of(data.draw, plan)
    buffers = contributions(plan, seed)
    results = run_virtually(run_round(plan, buffers, seed, faults))
    for result in results.values():
        check(plan, buffers, result)
    same: dict[tuple[int, int], set[object]] = {}
    for result in results.values():
        for part in result.parts:
            if part.contributors:
                same.setdefault((part.start, part.stop), set()).add((part.contributors, part.digest))
    assert all(len(versions) == 1 for versions in same.values()), "there is one version of every part, or none"


@given(st.data(), st.integers(0, 2**32))
@settings(max_examples=EXAMPLES // 3)
def test_all_or_nothing(data: st.DataObject, seed: int) -> None:
    plan = data.draw(plans(missing="fail"))
    faults = faults_of(data.draw, plan)
    buffers = contributions(plan, seed)
    results = run_virtually(run_round(plan, buffers, seed, faults))
    for result in results.values():
        check(plan, buffers, result)
        assert all(set(part.contributors) in (set(), set(plan.contributors)) for part in result.parts)
        if not result.complete:
            with pytest.raises(CollectiveError, match="is not complete") as caught:
                result.require_complete()
            assert caught.value.blamed


def test_the_result_does_not_depend_on_who_is_first() -> None:
    plan = plan_of([1.0, 2.0, 3.0, 1.0], 5000)
    generator = torch.Generator().manual_seed(0)
    buffers = {name: torch.randn(plan.elements, generator=generator) for name in plan.contributors}
    digests = {run_virtually(run_round(plan, buffers, seed, [], codec="int8"))["a"].digest for seed in range(8)}
    assert len(digests) == 1


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_lost_contributor_is_left_out_by_name(what: str) -> None:
    plan = plan_of([1.0] * 4, 20_000)
    buffers = contributions(plan, 1)
    results = run_virtually(run_round(plan, buffers, 1, [(0.0, what, "d")], latest_start=0.01))
    for name in ("a", "b", "c"):
        check(plan, buffers, results[name])
        assert results[name].blamed == ("d",)
        held = [part for part in results[name].parts if part.owner != "d"]
        assert all(set(part.contributors) >= {"a", "b", "c"} for part in held), "nobody else is left out"
        assert all(part.blamed == ("d",) for part in results[name].missing)


def test_a_member_cut_off_from_an_owner_gets_its_part_from_the_others() -> None:
    plan = plan_of([1.0, None, None], 20_000)
    buffers = contributions(plan, 1)
    owner = next(cell.owner for cell in plan.cells)
    other = next(name for name in ("b", "c") if name != owner)
    results = run_virtually(run_round(plan, buffers, 1, [(0.0, "cut", f"{owner} {other}")], latest_start=0.01))
    assert all(part.contributors for part in results[other].parts if part.owner == owner)
