"""Who adds up what: for random holdings every number of a parameter is summed over all that contribute, and counted once in a norm."""

from collections import Counter
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.modes.lockstep.gradients import GradientGroup, Share, gradient_groups
from atoll.runtime.stage.shard_spec import ShardSpec

LENGTH = 12


def divided(sizes: list[int], index: int, blocks: int) -> ShardSpec:
    """The part `index` of a dimension of fused blocks, each divided by `sizes`."""
    whole, block = sum(sizes), LENGTH // blocks
    first, last = ([*accumulate(sizes, initial=0)][index + i] for i in (0, 1))
    parts = [(b * block + first * block // whole, b * block + last * block // whole) for b in range(blocks)]
    return ShardSpec(name="w", shape=(LENGTH, 2), dim=0, parts=tuple(part for part in parts if part[0] < part[1]))


@st.composite
def holders(draw: st.DrawFn) -> list[Share]:
    """Some lanes of some stages, each divided in a way of its own, or not at all."""
    shares: list[Share] = []
    rank, blocks = 0, draw(st.sampled_from([1, 2, 3]))
    whole = ShardSpec(name="w", shape=(LENGTH, 2))
    for stage in range(draw(st.integers(1, 2))):
        tensor = draw(st.integers(1, 3))
        for _ in range(draw(st.integers(1, 3))):
            sizes = draw(st.sampled_from([None, *([1] * tensor, [2] + [1] * (tensor - 1))])) if tensor > 1 else None
            lane = tuple(range(rank, rank + tensor))
            for index in range(tensor):
                holding = whole if sizes is None else divided([s * (4 // sum(sizes) or 1) for s in sizes], index, blocks)
                shares.append(Share(rank=rank + index, stage=stage, tensor=index, lane=lane, holding=holding))
            rank += tensor
    return shares


def rows(share: Share) -> set[int]:
    """Indices of the dimension that a rank holds."""
    holding = share.holding
    return {i for start, stop in holding.parts or ((0, LENGTH),) for i in range(start, stop)}


def covered(part: GradientGroup) -> range:
    return range(LENGTH) if part.dim is None else range(part.start, part.stop)


@given(holders())
def test_gradients_of_a_number_are_summed_once_over_all_lanes(shares: list[Share]) -> None:
    """Every lane contributes 1 (its ranks have the same gradient, or the part of it they hold): the sum must be the number of lanes."""
    parts = gradient_groups(shares)
    for share in shares:
        for row in rows(share):
            mine = [part for part in parts if share.rank in part.ranks and row in covered(part)]
            assert len(mine) == 1, "a rank adds up each of its numbers in one group"
            total = sum(1 / repeats for repeats in mine[0].repeats)
            holding = {other.lane for other in shares if row in rows(other)}
            assert abs(total - len(holding)) < 1e-9
            assert all(row in rows(other) for other in shares if other.rank in mine[0].ranks)


@given(holders())
def test_a_norm_counts_each_number_once(shares: list[Share]) -> None:
    parts = gradient_groups(shares)
    counts: Counter[int] = Counter()
    for part in parts:
        for row in covered(part):
            counts[row] += len(part.ranks) / part.holders  # type: ignore[assignment]
    assert all(abs(counts[row] - 1) < 1e-9 for row in {row for share in shares for row in rows(share)})


@given(holders())
def test_parts_ascend_and_say_which_stages_use_them(shares: list[Share]) -> None:
    parts = gradient_groups(shares)
    for one, other in pairwise(parts):
        assert one.start <= other.start
    for part in parts:
        users = {share.stage for share in shares if set(covered(part)) <= rows(share)}
        assert set(part.stages) == users
