"""Bridges of random plans: every receiver gets each of its samples once, from somebody who has it, and gradients go the same way back."""

from collections import Counter

from hypothesis import given

from atoll.plan import Plan
from atoll.runtime.modes.lockstep.channels import SampleTransfer, backward_hops, forward_hops
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace

from .test_layout_of_ranks import layout_of, plans


def samples_of(layout: Layout, stage: int, micro_batch: int) -> dict[int, range]:
    """What each rank that computes a micro-batch at a stage has of it."""
    replica, tensor = layout.route[stage][micro_batch], layout.plan.stages[stage].tensor
    pieces = enumerate(layout.pieces(stage, micro_batch))
    return {layout.rank(RankPlace(stage, replica, lane, t)): range(*piece) for lane, piece in pieces for t in range(tensor)}


def check_hops(hops: tuple[SampleTransfer, ...], senders: dict[int, range], receivers: dict[int, range]) -> None:
    got: Counter[tuple[int, int]] = Counter()
    for hop in hops:
        assert hop.start < hop.stop
        assert set(range(hop.start, hop.stop)) <= set(senders[hop.source])
        got.update((hop.target, sample) for sample in range(hop.start, hop.stop))
    assert got == Counter((rank, sample) for rank, samples in receivers.items() for sample in samples)
    pairs = Counter((hop.source, hop.target) for hop in hops)
    assert max(pairs.values()) == 1, "a pair of ranks exchanges one message"


@given(plans())
def test_every_receiver_gets_each_of_its_samples_once(plan: Plan) -> None:
    layout = layout_of(plan)
    for stage in range(1, len(plan.stages)):
        for m in range(len(layout.micro_batches)):
            before, after = samples_of(layout, stage - 1, m), samples_of(layout, stage, m)
            check_hops(forward_hops(layout, stage, m), before, after)
            check_hops(backward_hops(layout, stage - 1, m), after, before)
