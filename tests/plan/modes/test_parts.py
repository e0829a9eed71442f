"""Where parts are placed, and what a plan of them may be."""

from pathlib import Path

import pytest

from atoll.cluster import load_cluster
from atoll.errors import PlanError
from atoll.plan import Plan
from atoll.plan.modes.parts import PARTS, PartLoad, place_parts
from atoll.plan.plan import Replica, Stage

CLUSTER = load_cluster(Path(__file__).parents[3] / "examples" / "clusters" / "two_sites.toml")  # A100s in oslo, RTX-3090s in rome


def loads(*rows: tuple[str, int, bool, str | None]) -> list[PartLoad]:
    return [PartLoad(*row, precision="bf16") for row in rows]


def test_the_largest_is_where_it_ends_soonest_and_others_stay_at_their_sites() -> None:
    parts = loads(("small", 10**6, True, None), ("large", 10**9, True, None), ("teacher", 10**9, False, "rome"))
    plan, reasons = place_parts(parts, CLUSTER, "job", 8)
    sites = {name: CLUSTER.device(stage.devices[0]).site for name, stage in zip(("small", "large", "teacher"), plan.stages, strict=True)}
    assert sites["large"] == "oslo"
    assert sites["teacher"] == "rome"
    assert len({stage.devices for stage in plan.stages}) == 3
    assert reasons[1].startswith("large: on oslo")
    assert reasons[2].endswith("at rome, as it says")
    assert Plan.from_json(plan.to_json()) == plan
    assert list(PARTS.problems(plan)) == []


def test_more_parts_than_devices_share_them() -> None:
    plan, reasons = place_parts(loads(*((f"part{n}", 10**6, True, None) for n in range(20))), CLUSTER, "job", 8)
    devices = [stage.devices[0] for stage in plan.stages]
    assert 4 <= len(set(devices)) <= 8
    assert sum(reason.endswith("with others") for reason in reasons) == 20 - len(set(devices))


def test_a_site_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="teacher: its site is 'bergen', and two sites has oslo, rome"):
        place_parts(loads(("teacher", 1, False, "bergen")), CLUSTER, "job", 8)


def test_a_part_has_one_device() -> None:
    stage = Stage(start=0, stop=1, replicas=(Replica(devices=("a/0", "a/1"), samples=(4, 4)),))
    plan = Plan(graph="job", cluster="here", batch_size=8, micro_batch_size=8, stages=(stage,), mode="parts")
    assert PARTS.why_not(plan) == "mode parts computes every part whole, on one device"
