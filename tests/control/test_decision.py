"""Which frozen buffers make up a step."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.control.messages import BufferManifest, Manifest
from atoll.control.reduction import choose, choose_stages

ROUND = (1, 1)


def manifest(worker: str, *buffers: set[int], stage: int = 0) -> Manifest:
    rows = tuple(BufferManifest(index, frozenset(held), float(sum(held)), float(len(held))) for index, held in enumerate(buffers))
    return Manifest(ROUND, worker, 1, 0, 0, stage, rows, 0)


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))), max_size=6),
    st.integers(1, 10),
)
def test_chosen_buffers_are_disjoint_and_what_is_missing_is_what_they_lack(rows: list[tuple[set[int], set[int]]], count: int) -> None:
    everything = frozenset(range(count))
    manifests = [manifest(f"w{i}", *pair) for i, pair in enumerate(rows)]
    choice = choose(manifests, everything)
    held = {(m.worker, m.incarnation, b.index): b.micro_batches for m in manifests for b in m.buffers}
    chosen = [held[buffer] for buffer in choice.buffers]
    assert sum(map(len, chosen)) == len(frozenset().union(*chosen))
    assert choice.missing == everything - frozenset().union(*chosen)
    assert choice.weight == sum(map(len, chosen))
    assert all(buffer <= everything for buffer in chosen)


def test_the_largest_is_kept_and_equal_ones_by_name() -> None:
    choice = choose([manifest("b", {0, 1}), manifest("a", {0, 1}), manifest("c", {1, 2, 3}), manifest("d", {0})], frozenset(range(4)))
    assert choice.buffers == (("c", 1, 0), ("d", 1, 0))
    assert not choice.missing


def test_the_order_of_manifests_does_not_matter() -> None:
    rows = [manifest("a", {0, 1}, {2}), manifest("b", {2, 3}), manifest("c", {3})]
    assert choose(rows, frozenset(range(4))) == choose(rows[::-1], frozenset(range(4)))


def test_every_stage_is_chosen_for_by_itself() -> None:
    choices = choose_stages([manifest("a", {0}), manifest("b", {0, 1}, stage=1)], 2, frozenset({0, 1}))
    assert [sorted(choice.missing) for choice in choices] == [[1], []]
