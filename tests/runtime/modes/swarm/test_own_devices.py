"""Which workers a plan means: one for every replica, with the replica's devices."""

import pytest
import torch

from atoll.errors import AtollError, PlanError
from atoll.plan import parse_plan, validate
from atoll.runtime.modes.swarm.spec import OwnDevices, check_devices, devices_here, planned_workers

PLAN = """plan v1 graph=g cluster=c mode=swarm schedule=1f1b batch=16 micro_batch=4
stage 0: layers 0-1: a/0=8 b/[2-3]=2*4
stage 1: layers 2-4: (c/0 c/5)={samples}
"""


def test_the_devices_of_a_replica_are_one_worker() -> None:
    assert planned_workers(parse_plan(PLAN.format(samples="2*8"))) == [
        ("a", OwnDevices((0,), planned=(0,))),
        ("b", OwnDevices((2, 3), planned=(0,))),
        ("c", OwnDevices((0, 5), planned=(1,))),
    ]


def test_shares_are_those_of_its_samples() -> None:
    assert planned_workers(parse_plan(PLAN.format(samples="12,4")))[-1] == ("c", OwnDevices((0, 5), (3, 1), planned=(1,)))


def test_a_worker_on_two_hosts_is_refused() -> None:
    plan = parse_plan(PLAN.format(samples="2*8").replace("b/[2-3]=2*4", "b/2=8").replace("c/5", "d/5"))
    with pytest.raises(PlanError, match=r"stage 1: .* is on c and d"):
        validate(plan)


def test_a_machine_without_accelerators_uses_its_processor_for_each() -> None:
    if not torch.accelerator.is_available():
        assert OwnDevices((0, 1)).find() == [torch.device("cpu")] * 2


def test_more_devices_than_there_are_are_refused_and_more_than_cores_warned_of() -> None:
    there, kind = devices_here()
    assert check_devices(there, there, kind) is None
    assert check_devices(4, 4, "cuda") is None
    with pytest.raises(AtollError, match=r"--devices 5: this machine has 4 of kind cuda; ask for as many or fewer"):
        check_devices(5, 4, "cuda")
    assert (
        check_devices(2, 1, "core")
        == "--devices 2: this machine has 1 core, which they share: --devices 1 is as fast and takes less memory"
    )
