"""What a lab's processes find in their environment."""

import pytest

from atoll.errors import LabError
from atoll.fabric import shaped
from atoll.lab import environment
from atoll.lab.environment import device_environments, host_environment
from atoll.runtime.modes.lockstep.role import find_role
from atoll.runtime.run_directory import SPEEDS
from atoll.runtime.supervise.hosts import LabView, find_lab
from tests.lab.clusters import two_sites

CLUSTER = two_sites(devices=3)
ADDRESSES = {host.name: f"10.0.0.{i}" for i, host in enumerate(CLUSTER.hosts)}


def of_host(host: str, base: dict[str, str], *, impose_speeds: bool = False) -> dict[str, str]:
    view = LabView(name="lab-1", host=host, addresses=ADDRESSES, socket="/run/socket")
    return host_environment(view, "eth0", CLUSTER, "/c.toml", impose_speeds=impose_speeds, base=base)


def test_a_process_finds_the_lab_it_is_in() -> None:
    found = find_lab(of_host("rome-0", {}))
    assert found == LabView(name="lab-1", host="rome-0", addresses=ADDRESSES, socket="/run/socket")
    assert found is not None
    assert found.address == ADDRESSES["rome-0"]
    assert find_lab({}) is None


@pytest.mark.parametrize("broken", [{"ATOLL_LAB_HOSTS": "x"}, {"ATOLL_LAB_HOST": "paris"}])
def test_half_a_lab_is_an_error(broken: dict[str, str]) -> None:
    with pytest.raises(LabError, match="ATOLL_LAB"):
        find_lab({**of_host("rome-0", {}), **broken})


def test_on_every_host_alone_no_rank_is_given_but_torchrun_knows_all() -> None:
    environ = of_host("rome-1", {"PATH": "/bin", "GLOO_SOCKET_IFNAME": "mine"})
    assert find_role(environ) is None
    assert (environ["PET_NNODES"], environ["PET_NODE_RANK"], environ["PET_NPROC_PER_NODE"]) == ("4", "3", "3")
    assert (environ["PATH"], environ["GLOO_SOCKET_IFNAME"]) == ("/bin", "mine")
    assert SPEEDS not in environ


def test_ranks_are_the_files_devices_in_order() -> None:
    roles = [find_role({**of_host(host.name, {}), **one}) for host in CLUSTER.hosts for one in device_environments(CLUSTER, host.name)]
    assert [role.rank for role in roles if role] == list(range(12))
    assert {(role.world_size, role.local_world_size, role.master_addr) for role in roles if role} == {(12, 3, ADDRESSES["oslo-0"])}
    assert [role.local_rank for role in roles if role] == [0, 1, 2] * 4


def test_names_agree_with_those_who_read_them() -> None:
    assert environment.LINKS == shaped.LINKS
    assert of_host("rome-0", {}, impose_speeds=True)[SPEEDS] == "/c.toml"
