"""Imposed speeds: what a device of another speed takes, and only the computing of it."""

from pathlib import Path

import pytest
import torch

from atoll.cluster import parse_cluster
from atoll.cost import Calibration, Evaluator
from atoll.errors import PlanError
from atoll.graph import dense_transformer
from atoll.plan import Plan, Replica, Stage
from atoll.runtime.imposed_speed import Pace, pace_of_rank
from atoll.runtime.modes.lockstep.layout import Layout

_CLUSTER = """
[[site]]
name = "here"
network = { bandwidth = "1 Gbit/s", latency = "1 ms" }
  [[site.host]]
  name = "h"
  devices = [{ kind = "V100-32GB" }, { kind = "V100-32GB", speed = 0.25 }]
"""
_GRAPH = dense_transformer(name="g", layers=2, hidden=512, heads=8, sequence=128, vocabulary=1024, tied=False)


def _paces(stages: tuple[Stage, ...], micro_batch: int, batch: int) -> list[Pace]:
    plan = Plan(graph="g", cluster="c", batch_size=batch, micro_batch_size=micro_batch, stages=stages)
    evaluator = Evaluator(_GRAPH, parse_cluster(_CLUSTER), calibration=Calibration(kernel_seconds=0))  # launches depend on no speed
    layout = Layout(plan)
    return [_pace(plan, layout, rank, evaluator) for rank in range(layout.world_size)]


def _pace(plan: Plan, layout: Layout, rank: int, evaluator: Evaluator) -> Pace:
    homes = {place.stage: (plan.stages[place.stage], plan.stages[place.stage].replicas[place.replica]) for place in layout.places(rank)}
    return Pace(evaluator, homes, [stop - start for start, stop in layout.micro_batches], torch.device("cpu"))


def test_a_device_of_a_quarter_of_the_speed_takes_four_times_as_long() -> None:
    replicas = tuple(Replica(devices=(f"h/{i}",), samples=(4,)) for i in range(2))
    fast, slow = _paces((Stage(start=0, stop=4, replicas=replicas),), 4, 8)
    for backward in (False, True):
        assert slow.seconds(0, 1, backward=backward) == pytest.approx(4 * fast.seconds(0, 0, backward=backward), rel=1e-6)
    assert 0 < fast.seconds(0, 0, backward=False) < fast.seconds(0, 0, backward=True)


def test_a_short_micro_batch_takes_less() -> None:
    replica = Replica(devices=("h/0",), samples=(6,))
    (pace,) = _paces((Stage(start=0, stop=4, replicas=(replica,)),), 4, 6)
    assert pace.seconds(0, 1, backward=True) < pace.seconds(0, 0, backward=True)


def test_exchanges_are_not_imposed_since_they_happen() -> None:
    """Splitting tensors halves the computing of a lane at most; what its devices exchange is real and takes its own time."""
    whole = Stage(start=0, stop=4, replicas=(Replica(devices=("h/0",), samples=(4,)),))
    cluster = parse_cluster(_CLUSTER.replace("speed = 0.25", "speed = 1.0"))
    split = Stage(start=0, stop=4, tensor=2, replicas=(Replica(devices=("h/0", "h/1"), samples=(4,)),))
    modelled = Evaluator(_GRAPH, cluster).replica_seconds(split, split.replicas[0], 4)
    plan = Plan(graph="g", cluster="c", batch_size=4, micro_batch_size=4, stages=(split,))
    pace = _pace(plan, Layout(plan), 0, Evaluator(_GRAPH, cluster))
    imposed = sum(pace.seconds(0, 0, backward=backward) for backward in (False, True))
    assert modelled.tensor > 0
    assert imposed == pytest.approx(modelled.compute)
    (alone,) = _paces((whole,), 4, 4)
    assert imposed < sum(alone.seconds(0, 0, backward=backward) for backward in (False, True))


def test_what_is_computed_inside_is_computed() -> None:
    replica = Replica(devices=("h/0",), samples=(1,))
    (pace,) = _paces((Stage(start=0, stop=4, replicas=(replica,)),), 1, 1)
    done = []
    with pace.imposed(0, 0, False, True):
        done.append(1)
    assert done == [1]


def test_speeds_can_be_a_files_that_knows_the_plans_devices(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(_CLUSTER)
    stage = Stage(start=0, stop=4, replicas=(Replica(devices=("h/1",), samples=(4,)),))
    plan = Plan(graph="g", cluster="c", batch_size=4, micro_batch_size=4, stages=(stage,))
    pace = pace_of_rank(str(tmp_path / "c.toml"), plan, {0: 0}, [4], _GRAPH, torch.device("cpu"))
    expected = _pace(plan, Layout(plan), 0, Evaluator(_GRAPH, parse_cluster(_CLUSTER)))
    assert pace.seconds(0, 0, backward=True) == expected.seconds(0, 0, backward=True)
    (tmp_path / "c.toml").write_text(_CLUSTER.replace('"h"', '"other"'))
    with pytest.raises(PlanError, match="the plan uses h/1"):
        pace_of_rank(str(tmp_path / "c.toml"), plan, {0: 0}, [4], _GRAPH, torch.device("cpu"))
