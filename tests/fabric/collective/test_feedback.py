"""Error feedback of reductions: nothing is lost, debts stay bounded, and what was not used is not counted."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import FabricError
from atoll.fabric.collective import FixedCodecs, Network, PeerRates, ReductionResult, RoundMember, RoundPlan, SumFeedback, make_plan
from tests.fabric.collective.peers import party
from tests.fabric.collective.simulated import run_round, run_virtually

ELEMENTS = 1024
NAMES = ["a", "b", "c", "d"]


def plan_of(number: int, rates: list[float], weights: list[float | None], *, mean: bool = False, elements: int = ELEMENTS) -> RoundPlan:
    names = NAMES[: len(rates)]
    peers = tuple(PeerRates(name=n, up_bytes_per_s=r, down_bytes_per_s=r) for n, r in zip(names, rates, strict=True))
    members = [RoundMember(name=name, weight=weight) for name, weight in zip(names, weights, strict=True)]
    return make_plan(f"r{number}", elements, members, Network(peers=peers), mean=mean, chunk_elements=256)


def unit(generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(ELEMENTS, generator=generator)
    return values / values.norm()


def true_sum(plan: RoundPlan, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    weights = {name: plan.member(name).weight or 0.0 for name in plan.contributors}
    return torch.stack([buffers[name].double() * weight for name, weight in weights.items()]).sum(0)


def divisor(plan: RoundPlan) -> float:
    weight = sum(plan.member(name).weight or 0.0 for name in plan.contributors)
    return weight if plan.mean and weight else 1.0


@given(st.data(), st.integers(0, 2**32), st.booleans(), st.sampled_from(["top-k:0.1", "top-k:0.02", "int4", "int8"]))
@settings(max_examples=settings().max_examples // 8)
def test_results_and_debts_together_are_the_sums(data: st.DataObject, seed: int, mean: bool, codec: str) -> None:
    """Owners and weights change from round to round, and some rounds are repeated."""
    count = data.draw(st.integers(2, 4))
    debts = {name: SumFeedback(ELEMENTS) for name in NAMES[:count]}
    generator = torch.Generator().manual_seed(seed)
    arrived, wanted = torch.zeros(ELEMENTS, dtype=torch.float64), torch.zeros(ELEMENTS, dtype=torch.float64)
    for number in range(3):
        rates = data.draw(st.lists(st.sampled_from([1e5, 1e6, 1e7]), min_size=count, max_size=count))
        weights: list[float | None] = [1.0, *data.draw(st.lists(st.sampled_from([1.0, 2.0, None]), min_size=count - 1, max_size=count - 1))]
        plan = plan_of(number, rates, weights, mean=mean)
        buffers = {name: unit(generator) for name in plan.contributors}
        results: dict[str, ReductionResult] = {}
        for attempt in range(data.draw(st.integers(1, 2))):
            before = {name: debt.owed.clone() for name, debt in debts.items()}
            results = run_virtually(run_round(plan, buffers, seed + attempt, [], codec, feedback=debts))
            assert all(torch.equal(debts[name].owed, before[name]) for name in debts), "a round that is not kept changes nothing"
        for name, result in results.items():
            assert torch.equal(result.require_complete(), results["a"].value)
            debts[name].keep(result)
        arrived += results["a"].value.double() * divisor(plan)
        wanted += true_sum(plan, buffers)
        owed = torch.stack([debt.owed.double() for debt in debts.values()]).sum(0)
        assert torch.allclose(arrived + owed, wanted, atol=1e-5)


def test_debts_stay_bounded_and_means_converge() -> None:
    """Contributions have norm 1. An encoder keeps a tenth of the values, so it leaves q = √0.9 of a norm at most: a contributor's debt
    stays below q/(1-q), what it sends below 1/(1-q), and with four of those an owner's below 4q/(1-q)²."""
    generator = torch.Generator().manual_seed(0)
    debts = {name: SumFeedback(ELEMENTS) for name in NAMES}
    q = math.sqrt(1 - 0.1)
    step = q / (1 - q)
    bound = step + 4 * step / (1 - q)
    arrived, wanted, norms = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), []
    direction = unit(generator)
    for number in range(24):
        rates = [1e6 if (number // 3 + place) % 4 else 2e5 for place in range(4)]  # who owns what changes
        plan = plan_of(number, rates, [1.0, 1.0, 1.0, 1.0])
        buffers = {name: (direction + unit(generator)) / 2 for name in NAMES}
        results = run_virtually(run_round(plan, buffers, number, [], "top-k:0.1", feedback=debts))
        for name, result in results.items():
            debts[name].keep(result)
        arrived += results["a"].value
        wanted += true_sum(plan, buffers).float()
        norms.append(max(float(debt.owed.norm()) for debt in debts.values()))
        assert norms[-1] <= bound
    assert max(norms[12:]) < 1.5 * max(norms[:12]), "debts do not go on growing"
    assert float((arrived - wanted).norm() / wanted.norm()) < 0.3, "what arrives late is a small part of what arrived"


def test_a_failed_round_is_not_counted_and_one_without_somebody_keeps_that_debt() -> None:
    debts = {name: SumFeedback(ELEMENTS) for name in NAMES}
    generator = torch.Generator().manual_seed(1)
    for number in range(2):
        plan = plan_of(number, [1e6] * 4, [1.0] * 4)
        buffers = {name: unit(generator) for name in NAMES}
        faults = [(0.0, "kill", "d")] if number else []
        results = run_virtually(run_round(plan, buffers, 1, faults, "top-k:0.1", latest_start=0.01, feedback=debts))
        before = {name: debt.owed.clone() for name, debt in debts.items()}
        for name, result in results.items():
            assert result.complete == (number == 0)
            debts[name].keep(result)
    for name in ("a", "b", "c"):
        for part in results[name].parts:
            if not part.contributors:
                same = torch.equal(debts[name].owed[part.start : part.stop], before[name][part.start : part.stop])
                assert same, "what did not become part of a result is owed as before"


def test_feedback_that_does_not_fit_is_refused() -> None:
    plan = plan_of(0, [1e6, 1e6], [1.0, 1.0], elements=600)
    with party(("a", "b"), codecs=FixedCodecs("top-k:0.1")) as peers:
        one, values = peers.collectives["a"], torch.ones(600)
        with pytest.raises(FabricError, match="need error feedback; give reduce a SumFeedback"):
            one.reduce_soon(plan, values).result(60)
        with pytest.raises(FabricError, match="error feedback of 599 values was given a round of 600"):
            one.reduce_soon(plan, values, feedback=SumFeedback(599)).result(60)
        debts = {name: SumFeedback(600) for name in "ab"}
        futures = {name: peers.collectives[name].reduce_soon(plan, values, feedback=debts[name]) for name in "ab"}
        results = {name: future.result(60) for name, future in futures.items()}
        for name in "ab":
            debts[name].keep(results[name])
            with pytest.raises(FabricError, match="not the one this error feedback was last used in"):
                debts[name].keep(results[name])
        owed = debts["a"].owed + debts["b"].owed
        assert torch.allclose(results["a"].require_complete() + owed, torch.full((600,), 2.0))


def test_values_that_are_not_finite_fail_the_round_by_name_and_leave_debts_alone() -> None:
    plan = plan_of(0, [1e6, 1e6], [1.0, 1.0])
    debts = {name: SumFeedback(ELEMENTS) for name in "ab"}
    buffers = {"a": torch.ones(ELEMENTS), "b": torch.full((ELEMENTS,), math.nan)}
    results = run_virtually(run_round(plan, buffers, 0, [], "top-k:0.1", feedback=debts))
    for name, result in results.items():
        assert not result.complete
        assert any("NaN or Inf" in part.reason for part in result.parts)
        debts[name].keep(result)
        assert bool(debts[name].owed.isfinite().all())
