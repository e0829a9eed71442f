"""Calibration from a run whose truth is known: another calibration's cost model plays the machine."""

import msgspec
import pytest

from atoll.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from atoll.cost import Calibration, Evaluator, cost
from atoll.graph import Graph, preset
from atoll.plan import Plan, Replica, Stage, validate
from atoll.runtime.modes.lockstep.calibration import calibrate
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.measurement import RankMeasured, StageMeasured

TRUTH = Calibration(matmul_efficiency=0.3, memory_efficiency=0.25, kernel_seconds=2e-5, step_seconds=0.004)
PARTS = ("forward", "backward", "receive", "send", "data", "synchronise", "agree", "optimizer", "other")
BATCH = 16


def graph() -> Graph:
    return preset("gpt2", batch_size=BATCH).graph


def cluster(speeds: tuple[float, ...] = (1.0, 1.0), *, alike: bool = False) -> Cluster:
    kinds = [
        DeviceKind(name=name, memory_bytes=80e9, flops={"fp32": flops, "bf16": flops}, memory_bytes_per_s=1e12)
        for name, flops in (("fast", 4e13), ("slow", 1e13))
    ]
    devices = tuple(
        Device(name=f"h/{i}", kind=kinds[0 if alike else i % 2], host="h", site="s", memory_bytes=80e9, speed=speed)
        for i, speed in enumerate(speeds)
    )
    link = Link(between=("h", "h"), bytes_per_s=5e10, latency_s=5e-6)
    host = Host(name="h", site="s", devices=devices, link=link)
    return Cluster(name="c", sites=(Site(name="s", hosts=(host,), link=msgspec.structs.replace(link, between=("s", "s"))),))


def data_parallel(layers: int, shares: tuple[int, int] = (8, 8), micro: int = 4) -> Plan:
    replicas = tuple(Replica(devices=(f"h/{i}",), samples=(share,)) for i, share in enumerate(shares))
    return Plan(
        graph="gpt2", cluster="c", batch_size=BATCH, micro_batch_size=micro, stages=(Stage(start=0, stop=layers, replicas=replicas),)
    )


def pipeline(layers: int, cut: int, *, recompute: bool = False, micro: int = 2) -> Plan:
    stages = tuple(
        Stage(start=start, stop=stop, replicas=(Replica(devices=(f"h/{i}",), samples=(BATCH,)),), recompute=recompute)
        for i, (start, stop) in enumerate(((0, cut), (cut, layers)))
    )
    return Plan(graph="gpt2", cluster="c", batch_size=BATCH, micro_batch_size=micro, stages=stages)


def lanes(layers: int, *, sharded: bool = False, tensor: int = 1) -> Plan:
    replica = Replica(devices=("h/0", "h/1"), samples=(BATCH,) if tensor == 2 else (BATCH // 2, BATCH // 2))
    stage = Stage(start=0, stop=layers, replicas=(replica,), sharded=sharded, tensor=tensor)
    return Plan(graph="gpt2", cluster="c", batch_size=BATCH, micro_batch_size=4, stages=(stage,))


def measured(model: Graph, devices: Cluster, plan: Plan) -> list[RankMeasured]:
    """What ranks would have written, were the truth the machine they ran on."""
    validate(plan, model, devices)
    evaluator, layout = Evaluator(model, devices, calibration=TRUTH), Layout(plan)
    step = evaluator.cost(plan).step_seconds
    ranks = []
    for rank, device in enumerate(layout.devices):
        stages, update = [], 0.0
        for place in layout.places(rank):
            stage = plan.stages[place.stage]
            replica = stage.replicas[place.replica]
            own = layout.micro_batches_of(place.stage, place.replica)
            start, stop = layout.pieces(place.stage, own[0])[place.lane]
            whole = layout.micro_batches[own[0]]
            price = evaluator.replica_seconds(stage, replica, float(whole[1] - whole[0]))
            update += price.update
            stages.append(
                StageMeasured(
                    stage=place.stage,
                    replica=place.replica,
                    lane=place.lane,
                    tensor=place.tensor,
                    samples=stop - start,
                    micro_batches=len(own),
                    forward_seconds=price.forward,
                    backward_seconds=price.backward,
                )
            )
        seconds = dict.fromkeys(PARTS, 0.0) | {"optimizer": update, "agree": TRUTH.collective_seconds}
        ranks.append(
            RankMeasured(
                rank=rank,
                device=device,
                accelerator="cpu",
                threads=1,
                first_step=1,
                steps=10,
                step_seconds=step,
                seconds=seconds,
                total_seconds=seconds,
                stages=tuple(stages),
                exchanges=(),
                buckets=(),
                peak_memory_bytes=None,
                recent=(),
            )
        )
    return ranks


def plans(layers: int) -> list[Plan]:
    return [
        data_parallel(layers),
        data_parallel(layers, (12, 4), 2),
        pipeline(layers, layers // 2),
        pipeline(layers, layers // 3, recompute=True),
        lanes(layers, sharded=True),
        lanes(layers, tensor=2),
    ]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5)])
def test_the_plan_that_ran_is_predicted_and_others_sensibly(number: int, speeds: tuple[float, float]) -> None:
    model, devices = graph(), cluster(speeds)
    every = plans(len(model.layers))
    ran = every[number]
    found = calibrate(model, devices, ran, measured(model, devices, ran))
    truth = cost(model, devices, ran, calibration=TRUTH).step_seconds
    assert cost(model, devices, ran, calibration=found).step_seconds == pytest.approx(truth, rel=0.02)
    for plan in every:
        truth = cost(model, devices, plan, calibration=TRUTH).step_seconds
        before = cost(model, devices, plan).step_seconds
        after = cost(model, devices, plan, calibration=found).step_seconds
        assert abs(after / truth - 1) < min(0.35, abs(before / truth - 1)), str(plan)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("part", [0.8, 1.2])
def test_the_whole_step_counts_where_its_parts_add_up_to_something_else(number: int, part: float) -> None:
    model, devices = graph(), cluster()
    ran = plans(len(model.layers))[number]
    ranks = [msgspec.structs.replace(rank, step_seconds=part * rank.step_seconds) for rank in measured(model, devices, ran)]
    found = calibrate(model, devices, ran, ranks)
    assert cost(model, devices, ran, calibration=found).step_seconds == pytest.approx(ranks[0].step_seconds, rel=0.01)


def test_a_calibration_survives_its_file_and_names_the_run() -> None:
    model, devices = graph(), cluster()
    plan = pipeline(len(model.layers), 5)
    found = calibrate(model, devices, plan, measured(model, devices, plan))
    assert msgspec.json.decode(found.to_json(), type=Calibration) == found
    assert found.source == "gpt2 on c, as it ran until step 10"
    assert {row.kind for row in found.layer_times} == {"fast", "slow"}


def test_layers_are_told_apart_where_stages_tell_them_apart() -> None:
    """The last layer takes four times what the model thinks, all others exactly that: two stages of alike blocks show which it is."""
    model, devices = graph(), cluster(alike=True)
    layers = len(model.layers)
    plan, base = pipeline(layers, layers // 2), Evaluator(model, devices)
    last = base.replica_seconds(Stage(start=layers - 1, stop=layers, replicas=plan.stages[1].replicas), plan.stages[1].replicas[0], 2.0)
    rows = []
    for rank in measured(model, devices, plan):
        (stage,) = rank.stages
        price = base.replica_seconds(plan.stages[stage.stage], plan.stages[stage.stage].replicas[0], 2.0)
        slower = 3 * last.forward if stage.stage == 1 else 0.0
        stage = msgspec.structs.replace(stage, forward_seconds=price.forward + slower, backward_seconds=price.backward)
        rows.append(msgspec.structs.replace(rank, stages=(stage,)))
    found = calibrate(model, devices, plan, rows)
    for layer, factor in ((model.layers[-1], 4.0), (model.layers[1], 1.0)):
        (row,) = [row for row in found.layer_times if row.layer in (layer.name, layer.signature) and row.samples == 2.0]
        number = model.layers.index(layer)
        alone = Stage(start=number, stop=number + 1, replicas=plan.stages[0].replicas)
        assert row.forward_seconds == pytest.approx(factor * base.replica_seconds(alone, plan.stages[0].replicas[0], 2.0).forward, rel=0.1)
