"""No answer is worse than what anyone would try by hand; every case here once was."""

from collections.abc import Iterable, Iterator

import pytest
from msgspec.structs import replace

from atoll.cluster import make_cluster, make_site
from atoll.cost import Evaluator
from atoll.graph import preset
from atoll.plan import Plan, Replica, Stage, validate
from atoll.planner import plan
from atoll.planner.baselines import baselines


@pytest.mark.parametrize(
    ("model", "kind", "devices", "memory", "batch"),
    [
        ("bert-large", "A100-40GB", 1, None, 127),  # a prime batch has no divisors: any micro-batch will do
        ("t5-large", "A100-40GB", 8, None, 97),  # shards over lanes with unequal samples
        ("gpt2-xl", "A100-40GB", 7, "6 GB", 2),  # 25 heads over 7 devices, or nothing fits
        ("gpt3-2.7b", "A100-40GB", 3, "30 GB", 2),
        ("t5-large", [("A100-40GB", 2), ("T4", 3)], 1, None, 64),  # one host of two kinds
        ("llama-7b", "A100-80GB", 7, None, 13),
    ],
)
def test_nothing_simple_is_faster(model: str, kind: str, devices: int, memory: str | None, batch: int) -> None:
    chosen = preset(model)
    cluster = make_cluster("c", [make_site("a", kind=kind, devices=devices, memory=memory)])
    best = plan(chosen.graph, cluster, batch_size=batch, optimizer=chosen.optimizer).candidates[0]
    validate(best.plan, chosen.graph, cluster)
    evaluator = Evaluator(chosen.graph, cluster, optimizer=chosen.optimizer)
    simple = [*_fitting(evaluator, baselines(evaluator, batch)), *_even_pipelines(evaluator, batch)]
    assert simple
    assert best.cost.step_seconds <= min(evaluator.seconds(one) for one in simple) * 1.001


def _fitting(evaluator: Evaluator, plans: Iterable[Plan]) -> Iterator[Plan]:
    for one in plans:
        again = replace(one, stages=tuple(replace(stage, recompute=True) for stage in one.stages))
        yield from [candidate for candidate in (one, again) if evaluator.fits(candidate)][:1]


def _even_pipelines(evaluator: Evaluator, batch: int) -> list[Plan]:
    names = [device.name for device in evaluator.cluster.devices]
    layers, stages = len(evaluator.graph.layers), len(names)
    bounds = [layers * s // stages for s in range(stages + 1)]
    rows = tuple(
        Stage(start=bounds[s], stop=bounds[s + 1], replicas=(Replica(devices=(name,), samples=(batch,)),)) for s, name in enumerate(names)
    )
    plans = []
    for micro in (b for b in range(1, batch + 1) if batch % b == 0):
        made = Plan(graph=evaluator.graph.name, cluster="c", batch_size=batch, micro_batch_size=micro, stages=rows)
        if evaluator.fits(made):
            plans.append(made)
    return plans
