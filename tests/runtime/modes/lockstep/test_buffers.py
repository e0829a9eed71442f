"""Which rank's running statistics count, and who takes them over."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.modes.lockstep.agreement import Bundle, SaidOfBuffers, bundles

NAMES = ("mean", "variance", "count")
places = st.tuples(*(st.integers(0, 2) for _ in range(4)))
said = st.lists(
    st.builds(
        lambda changed, read: SaidOfBuffers(held=sorted({*changed, *read}), changed=changed),
        st.dictionaries(st.sampled_from(NAMES), places),
        st.sets(st.sampled_from(NAMES)),
    ),
    min_size=1,
    max_size=5,
)


def test_replicas_take_over_the_firsts() -> None:
    first = SaidOfBuffers(held=["mean", "variance"], changed={"mean": (0, 0, 0, 0), "variance": (0, 0, 0, 0)})
    second = SaidOfBuffers(held=["mean", "variance"], changed={"mean": (0, 1, 0, 0), "variance": (0, 1, 0, 0)})
    reader = SaidOfBuffers(held=["mean"], changed={})
    assert bundles([second, first]) == [Bundle((0, 1), 1, ("mean", "variance"))]
    assert bundles([first, second, reader]) == [Bundle((0, 1), 0, ("variance",)), Bundle((0, 1, 2), 0, ("mean",))]
    assert bundles([first, reader, SaidOfBuffers(held=["other"], changed={})]) == [Bundle((0, 1), 0, ("mean",))]


def test_what_nobody_changes_or_one_rank_alone_has_does_not_travel() -> None:
    reader = SaidOfBuffers(held=["mean"], changed={})
    assert bundles([reader, reader]) == []
    assert bundles([SaidOfBuffers(held=["mean"], changed={"mean": (0, 0, 0, 0)}), SaidOfBuffers(held=[], changed={})]) == []


@given(said)
def test_everybody_who_has_a_changed_buffer_gets_the_first_places_once(ranks: list[SaidOfBuffers]) -> None:
    made = bundles(ranks)
    for name in NAMES:
        holders = [rank for rank, one in enumerate(ranks) if name in one.held]
        changing = {rank: one.changed[name] for rank, one in enumerate(ranks) if name in one.changed}
        carrying = [bundle for bundle in made if name in bundle.names]
        assert len(carrying) == bool(changing and len(holders) > 1)
        for bundle in carrying:
            assert list(bundle.ranks) == holders
            assert changing[bundle.source] == min(changing.values())
