"""Links whose connections share the bandwidth of their hosts."""

import pytest

from atoll.simulate.links import SharedLinks


def test_a_connection_alone_has_all_of_the_link_and_sends_one_message_after_another() -> None:
    links = SharedLinks(10.0)
    assert links.arrives_at(0.0, "a", "b", 50.0) == 5.0
    assert links.arrives_at(1.0, "a", "b", 50.0) == 10.0
    assert links.arrives_at(20.0, "a", "b", 50.0) == 25.0


@pytest.mark.parametrize("fan_out", [True, False])
def test_connections_share_the_link_up_and_down(fan_out: bool) -> None:
    links = SharedLinks(10.0)
    ends = [links.arrives_at(0.0, *(("a", name) if fan_out else (name, "a")), 50.0) for name in "bcd"]
    assert ends == [5.0, 10.0, 15.0]
    assert links.arrives_at(0.0, "x", "y", 50.0) == 5.0
