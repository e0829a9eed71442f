"""Bytes a step puts on every link, by the plan alone."""

from typing import TYPE_CHECKING

from atoll.codec import codec_spec
from atoll.cost.communication import Span, collective_bytes
from atoll.cost.pipeline import route
from atoll.plan import Plan, Stage

if TYPE_CHECKING:
    from atoll.cost.evaluate import Evaluator

__all__ = ["link_bytes"]


def link_bytes(evaluator: "Evaluator", plan: Plan) -> dict[str, float]:
    """By link name: `"oslo–rome"` between sites, a site's name for its network, `"inside hosts"` for the rest."""
    carried: dict[str, float] = {}
    for stage in plan.stages:
        _sync_bytes(evaluator, plan, stage, carried)
    for here, there in zip(plan.stages, plan.stages[1:], strict=False):
        _boundary_bytes(evaluator, plan, here, there, carried)
    return carried


def _add(carried: dict[str, float], more: dict[str, float], times: float) -> None:
    for name, nbytes in more.items():
        carried[name] = carried.get(name, 0.0) + nbytes * times


def _sync_bytes(evaluator: "Evaluator", plan: Plan, stage: Stage, carried: dict[str, float]) -> None:
    for across, nbytes in evaluator.sync_volumes(stage):
        span = evaluator.sync_span(stage, across)
        if span is None:
            continue
        groups = stage.tensor if across else stage.tensor * stage.lanes
        per_group = collective_bytes(span, nbytes, 2.0, plan.codecs)
        if plan.mode == "islands":
            per_group = _less_wan(span, per_group, plan.outer_steps)
        _add(carried, per_group, groups)


def _less_wan(span: Span, carried: dict[str, float], outer_steps: int) -> dict[str, float]:
    names = {link.name for link in span.wan_links}
    return {name: nbytes / (max(1, outer_steps) if name in names else 1) for name, nbytes in carried.items()}


def _boundary_bytes(evaluator: "Evaluator", plan: Plan, here: Stage, there: Stage, carried: dict[str, float]) -> None:
    """Activations forth and gradients back, along the routes of the micro-batches."""
    boundary = evaluator.graph.layers[here.stop - 1]
    both = (boundary.output_bytes + boundary.gradient_bytes) * plan.micro_batch_size
    element = 4.0 if evaluator.graph.precision == "fp32" else 2.0
    from_counts, to_counts = ([-(-replica.total_samples // plan.micro_batch_size) for replica in stage.replicas] for stage in (here, there))
    pairs: dict[tuple[int, int], int] = {}
    for pair in zip(route(from_counts), route(to_counts), strict=True):
        pairs[pair] = pairs.get(pair, 0) + 1
    for (i, j), times in pairs.items():
        a, b = (evaluator.devices[stage.replicas[k].devices[0]] for stage, k in ((here, i), (there, j)))
        if a.name == b.name:
            continue
        name = "inside hosts" if a.host == b.host else evaluator.cluster.link_between(a, b).name
        ratio = codec_spec(plan.codecs.get(name, "none")).ratio(element)
        _add(carried, {name: both * ratio}, times)
