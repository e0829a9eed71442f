"""Roles: what every launcher says, read right; what contradicts itself, refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import RoleError
from atoll.runtime.modes.lockstep.role import Role, find_role

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "oslo-1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "oslo[007-008],rome",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
INDEXED = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train"}


def found(environ: dict[str, str]) -> Role:
    role = find_role(environ)
    assert role is not None
    return role


def test_torchrun() -> None:
    assert found(TORCHRUN) == Role(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="oslo-1",
        master_port=29400,
        source="torchrun",
        generation=2,
        store_outside=True,
    )


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert found(SLURM | TORCHRUN) == found(TORCHRUN)


def test_torchrun_without_a_shared_store_leaves_it_to_rank_0() -> None:
    assert not found(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).store_outside
    assert found(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False", "RANK": "0", "LOCAL_RANK": "0"}).hosts_store


def test_atolls_own_launcher() -> None:
    role = found(TORCHRUN | {"ATOLL_GENERATION": "3"})
    assert (role.source, role.generation, role.store_outside) == ("atoll", 3, True)


def test_slurm() -> None:
    role = found(SLURM)
    assert (role.rank, role.world_size, role.local_rank, role.local_world_size) == (5, 7, 1, 3)
    assert (role.master_addr, role.source, role.store_outside) == ("oslo007", "slurm", False)


def test_slurm_ports_are_one_per_step_and_out_of_the_systems_way() -> None:
    assert found(SLURM).master_port == found(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).master_port
    assert (
        found(SLURM).master_port != found(SLURM | {"SLURM_JOB_ID": "4712"}).master_port != found(SLURM | {"SLURM_STEP_ID": "1"}).master_port
    )
    assert 15000 <= found(SLURM | {"SLURM_JOB_ID": "987654321"}).master_port < 30000


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("oslo", "oslo"), ("oslo,rome", "oslo"), ("oslo-[3,5-9],rome", "oslo-3"), ("r1n[01-04]-ib", "r1n01-ib"), ("a.b.c", "a.b.c")],
)
def test_slurms_first_host(nodes: str, first: str) -> None:
    assert found(SLURM | {"SLURM_JOB_NODELIST": nodes}).master_addr == first


def test_a_batch_script_and_a_shell_of_slurm_are_alone() -> None:
    without_step = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    assert find_role(without_step | {"ENVIRONMENT": "BATCH"}) is None
    assert find_role(SLURM | {"SLURM_STEP_ID": "4294967290"}) is None
    assert find_role({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "oslo"}) is None


def test_what_the_batch_script_exports_goes_first() -> None:
    role = found(SLURM | {"MASTER_ADDR": "rome", "MASTER_PORT": "1234", "WORLD_SIZE": "7"})
    assert (role.master_addr, role.master_port) == ("rome", 1234)


def test_kubernetes() -> None:
    role = found(INDEXED)
    assert (role.rank, role.world_size, role.local_rank, role.local_world_size, role.source) == (2, 4, 0, 1, "kubernetes")
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert (found(job).local_rank, found(job).local_world_size, found(job).source) == (0, 1, "kubernetes")


def test_alone() -> None:
    assert find_role({}) is None
    assert find_role({"MASTER_ADDR": "oslo", "MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "", "RANK": " "}) is None
    assert find_role({"JOB_COMPLETION_INDEX": "3"}) is None  # numbered, but not told of any others
    assert (
        find_role(
            SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
        )
        is None
    )


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "RANK is set but WORLD_SIZE is not"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE is set but RANK is not"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 with a world size of 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 with a local world size of 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "9 processes on this host, but 8 in all"),
        (TORCHRUN | {"RANK": "five"}, "RANK must be a whole number of 0 or more, got 'five'"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT must be a port"),
        (SLURM | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8 but Slurm started 7 tasks"),
        (SLURM | without(TORCHRUN, "TORCHELASTIC_RUN_ID") | {"RANK": "4", "WORLD_SIZE": "7"}, "RANK is 4 but SLURM_PROCID is 5"),
        (without(SLURM, "SLURM_NTASKS"), "SLURM_NTASKS"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not"),
        (without(SLURM, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST"),
        (SLURM | {"SLURM_NODEID": "2"}, "SLURM_NODEID is 2"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "four"}, "SLURM_TASKS_PER_NODE is 'four'"),
        (without(INDEXED, "WORLD_SIZE"), "WORLD_SIZE is not"),
        (without(INDEXED, "MASTER_ADDR"), "MASTER_ADDR is not"),
    ],
)
def test_partial_and_contradictory_variables_are_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(RoleError) as raised:
        find_role(environ)
    assert words in str(raised.value)


@given(
    st.dictionaries(
        st.sampled_from(sorted(TORCHRUN | SLURM | INDEXED)), st.sampled_from(["", "0", "1", "2", "-1", "x", "True", "oslo[1-2]", "2(x2)"])
    )
)
def test_any_environment_gives_a_role_that_can_be_or_a_sentence(environ: dict[str, str]) -> None:
    try:
        role = find_role(environ)
    except RoleError:
        return
    assert role is None or (role.rank < role.world_size and role.local_rank < role.local_world_size <= role.world_size)
