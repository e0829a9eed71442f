"""Where a member of a swarm listens: the address a run listens on holds for all its processes."""

import pytest

from atoll.runtime.modes.swarm.member_process import own_hosts


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "127.0.0.1:7000,10.0.0.1:7000"])
def test_members_of_a_run_on_the_loopback_interface_are_not_reached_from_elsewhere(address: str) -> None:
    assert own_hosts(address) == ("127.0.0.1", "127.0.0.1")


def test_where_a_run_listens_at_all_addresses_its_members_do_and_say_one_that_others_can_dial() -> None:
    host, told = own_hosts("0.0.0.0:7000")
    assert host == "0.0.0.0"
    assert told not in ("0.0.0.0", "")
