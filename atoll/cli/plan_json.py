"""What `atoll plan --json` prints; docs fix its shape, more keys may come."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.cli.target import Target
from atoll.cluster import Cluster
from atoll.cost import Cost
from atoll.graph import Graph
from atoll.plan import Plan, to_text

if TYPE_CHECKING:
    from atoll.planner import Planned

__all__ = ["checked_json", "planned_json"]


def planned_json(planned: "Planned", model: Target, cluster: Cluster) -> str:
    """The planner's answer, best plan first."""
    return _document(
        model,
        cluster,
        planned.seconds,
        [_entry(candidate.plan, candidate.cost, model.graph, candidate.reasons) for candidate in planned.candidates],
        {
            "considered": planned.considered,
            "exact": planned.exact,
            "ruled_out": planned.ruled_out,
            "bottleneck": planned.bottleneck,
            "relief": planned.relief,
        },
    )


def checked_json(plan: Plan, cost: Cost, model: Target, cluster: Cluster, reasons: Sequence[str] = ()) -> str:
    """One plan that was given rather than made, in the same shape."""
    return _document(model, cluster, 0.0, [_entry(plan, cost, model.graph, reasons)], {})


def _document(model: Target, cluster: Cluster, plan_seconds: float, plans: list[dict[str, Any]], more: dict[str, Any]) -> str:
    graph = model.graph
    document = {
        "capture_seconds": model.capture_seconds,
        "plan_seconds": plan_seconds,
        "graph": {"name": graph.name, "layers": len(graph.layers), "parameters": graph.parameters, "precision": graph.precision},
        "cluster": {"name": cluster.name, "sites": len(cluster.sites), "hosts": len(cluster.hosts), "devices": len(cluster.devices)},
        "batch_size": plans[0]["batch_size"],
        "notes": model.notes,
        **more,
        "plans": plans,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode()


def _entry(plan: Plan, cost: Cost, graph: Graph, reasons: Sequence[str]) -> dict[str, Any]:
    fields = msgspec.to_builtins(plan)
    stages = [{**stage, **msgspec.to_builtins(price)} for stage, price in zip(fields.pop("stages"), cost.stages, strict=True)]
    return {
        **fields,
        "text": to_text(plan),
        "stages": stages,
        "predicted": {
            "step_seconds": cost.step_seconds,
            "samples_per_second": cost.samples_per_second,
            "tokens_per_second": cost.samples_per_second * graph.tokens_per_sample,
            "memory_bytes": {device: use.total_bytes for device, use in cost.memory.items()},
            "memory_available_bytes": cost.memory_available,
            "link_bytes": cost.link_bytes,
            "breakdown": cost.breakdown,
            "dollars_per_step": cost.dollars_per_step,
            "fits": cost.fits,
        },
        "reasons": list(reasons),
    }
