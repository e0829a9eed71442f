"""Reductions over real fabrics: values, digests, agreement, refusals."""

from collections.abc import Sequence

import msgspec
import pytest
import torch

from atoll.errors import CollectiveError, FabricError, RefusedError
from atoll.events import ReductionFinished
from atoll.fabric import ShapedLink
from atoll.fabric.collective import (
    FixedCodecs,
    ReductionResult,
    RoundMember,
    RoundPlan,
    equal_network,
    make_plan,
)
from atoll.fabric.collective.chunk import PullChunks
from atoll.fabric.collective.collective import Reductions
from tests.fabric.collective.peers import NAMES, Party, party


def plan_of(round_id: str, elements: int, *, mean: bool = False, chunk_elements: int = 4096) -> RoundPlan:
    members = [RoundMember(name=name, weight=weight) for name, weight in zip(NAMES, (1.0, 2.0, 0.5, 4.0), strict=True)]
    return make_plan(round_id, elements, members, equal_network(NAMES, 1e7), mean=mean, missing="leave out", chunk_elements=chunk_elements)


def reduce_all(peers: Party, plan: RoundPlan, buffers: dict[str, torch.Tensor]) -> dict[str, ReductionResult]:
    futures = {name: peers.collectives[name].reduce_soon(plan, buffers.get(name)) for name in peers.collectives}
    return {name: future.result(120) for name, future in futures.items()}


@pytest.mark.parametrize("tcp", [False, True])
def test_everybody_ends_with_the_same_weighted_mean(tcp: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    buffers = {name: torch.randn(100, 331, generator=generator).to(torch.bfloat16 if name == "b" else torch.float32) for name in NAMES}
    with party(tcp=tcp, codecs=FixedCodecs("int8")) as peers:
        plan = plan_of("r", 33_100, mean=True)
        results = reduce_all(peers, plan, buffers)
        weights = {member.name: member.weight or 0.0 for member in plan.members}
        exact = torch.stack([buffers[name].double().view(-1) * weight for name, weight in weights.items()]).sum(0) / 7.5
        for name, result in results.items():
            assert result.complete
            assert torch.equal(result.value, results["a"].value), "bit for bit"
            assert result.digest == results["a"].digest
            assert float((result.value - exact).norm() / exact.norm()) < 0.02
            assert [event.complete for event in peers.events[name] if isinstance(event, ReductionFinished)] == [True]


def test_rounds_run_side_by_side_and_an_id_is_used_once() -> None:
    with party() as peers:
        plans = [plan_of(f"r{number}", 20_000) for number in range(4)]
        buffers = [{name: torch.full((20_000,), float(number)) for name in NAMES} for number in range(4)]
        futures = [
            [peers.collectives[name].reduce_soon(plan, buffer[name]) for name in NAMES] for plan, buffer in zip(plans, buffers, strict=True)
        ]
        for number, round_ in enumerate(futures):
            assert all(torch.equal(future.result(60).require_complete(), torch.full((20_000,), 7.5 * number)) for future in round_)
        with pytest.raises(FabricError, match="was begun already"):
            peers.collectives["a"].reduce_soon(plans[0], buffers[0]["a"]).result(60)


def test_a_member_that_never_begins_is_left_out_and_named() -> None:
    with party() as peers:
        plan = msgspec.structs.replace(plan_of("r", 20_000), begin_seconds=0.5, stall_seconds=0.5)
        buffers = {name: torch.ones(20_000) for name in NAMES}
        futures = {name: peers.collectives[name].reduce_soon(plan, buffers[name]) for name in NAMES if name != "d"}
        for future in futures.values():
            result = future.result(120)
            assert result.blamed == ("d",)
            assert all(part.contributors == ("a", "b", "c") for part in result.parts if part.owner != "d")
            with pytest.raises(CollectiveError, match=r"without d|missing, d"):
                result.require_complete()


def one_contributor(name: str, names: Sequence[str], elements: int) -> RoundPlan:
    members = [RoundMember(name=other, weight=1.0 if other == name else None) for other in names]
    return make_plan("r", elements, members, equal_network(names))


def test_a_result_stays_what_it_was_when_the_contribution_changes_afterwards() -> None:
    with party(link=ShapedLink(2e6, 0.005)) as peers:
        plan = one_contributor("a", NAMES, 100_000)
        source = torch.arange(100_000.0)
        futures = {name: peers.collectives[name].reduce_soon(plan, source if name == "a" else None) for name in NAMES}
        futures["a"].result(60)
        source.zero_()
        for name in ("b", "c", "d"):
            assert torch.equal(futures[name].result(60).require_complete(), torch.arange(100_000.0))


def test_what_a_member_may_not_ask_is_refused() -> None:
    with party() as peers:
        plan = plan_of("r", 20_000)
        reduce_all(peers, plan, {name: torch.ones(20_000) for name in NAMES})
        remote = peers.fabrics["a"].peer("b")

        async def first(pull: PullChunks) -> object:
            async for item in remote.stream(Reductions.contribution, pull, timeout_seconds=30):
                return item
            return None

        number = next(i for i, cell in enumerate(plan.cells) if cell.owner == "c")
        with pytest.raises(RefusedError, match="a has no claim"):
            peers.fabrics["a"].run(first(PullChunks("r", number)))
        with pytest.raises(RefusedError, match="has no cell 99"):
            peers.fabrics["a"].run(first(PullChunks("r", 99)))


def test_contributions_that_do_not_fit_are_refused_at_home() -> None:
    with party(("a", "b")) as peers:
        plan = make_plan("r", 100, [RoundMember(name="a"), RoundMember(name="b")], equal_network(["a", "b"]))
        for buffer, text in (
            (torch.ones(99), "100 values was due, got 99"),
            (None, "got none"),
            (torch.ones(100).long(), "cannot be summed"),
        ):
            with pytest.raises(FabricError, match=text):
                peers.collectives["a"].reduce_soon(plan, buffer).result(60)
        with pytest.raises(FabricError, match="the result needs"):
            peers.collectives["a"].reduce_soon(plan, torch.ones(100), torch.empty(99)).result(60)


def test_a_member_that_cannot_begin_tells_those_who_wait_for_it() -> None:
    with party(("a", "b")) as peers:
        plan = one_contributor("a", ("a", "b"), 100)
        waiting = peers.collectives["b"].reduce_soon(plan)
        with pytest.raises(FabricError, match="cannot be summed"):
            peers.collectives["a"].reduce_soon(plan, torch.ones(100).long()).result(60)
        assert "it did not begin there: round r: torch.int64 cannot be summed" in waiting.result(60).missing[0].reason


def test_nothing_at_all_can_be_reduced() -> None:
    with party(("a", "b")) as peers:
        plan = make_plan("r", 0, [RoundMember(name="a"), RoundMember(name="b")], equal_network(["a", "b"]))
        assert all(result.complete for result in reduce_all(peers, plan, {name: torch.empty(0) for name in "ab"}).values())
