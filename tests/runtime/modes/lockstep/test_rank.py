"""Turns: who builds the whole model when."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.modes.lockstep.rank import RankWork, turns


def test_all_at_once_where_memory_allows() -> None:
    assert turns(["a", "a", "b"], [100.0, 100.0, 100.0], 25.0) == [0, 0, 0]


def test_one_rank_of_a_host_at_a_time_where_it_does_not() -> None:
    assert turns(["a", "b", "a", "b", "a"], [100.0] * 5, 20.0) == [0, 0, 1, 1, 2]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.floats(1, 1e3), st.floats(1, 1e3))
def test_nobody_shares_a_turn_with_a_neighbour_unless_all_fit(hosts: list[str], free: float, model: float) -> None:
    order = turns(hosts, [free] * len(hosts), model)
    if any(order) or max(hosts.count(host) for host in hosts) * model > 0.5 * free:
        assert len({(host, turn) for host, turn in zip(hosts, order, strict=True)}) == len(hosts)


def test_a_rank_is_put_together_once_and_not_changed_afterwards() -> None:
    assert RankWork.__dataclass_params__.frozen  # type: ignore[attr-defined]
