"""Bytes a step puts on every link, by the plan alone."""

from collections import Counter

from atoll.codec import codec_spec
from atoll.cost.communication import collective_bytes, span_of
from atoll.cost.in_flight import micro_batch_counts
from atoll.cost.inside_traffic import add_inside
from atoll.cost.pipeline import route
from atoll.cost.setting import Setting
from atoll.cost.synchronisation import Synchronisation
from atoll.cost.transfer import Transfers
from atoll.plan import Plan, Stage

__all__ = ["link_bytes"]


def link_bytes(setting: Setting, synchronisation: Synchronisation, transfers: Transfers, plan: Plan) -> dict[str, float]:
    """By link name: `"oslo–rome"` between sites, a site's name for its network, `"inside hosts"` for the rest."""
    carried: Counter[str] = Counter()
    for stage in plan.stages:
        _add_sync(setting, synchronisation, plan, stage, carried)
        _add_split(setting, plan, stage, carried)
        add_inside(setting, plan, stage, carried)
    if len(plan.stages) > 1:
        _add_tied(setting, synchronisation, plan, carried)
        _add_boundaries(setting, transfers, plan, carried)
    return {name: float(nbytes) for name, nbytes in carried.items() if nbytes}


def _add_sync(setting: Setting, synchronisation: Synchronisation, plan: Plan, stage: Stage, carried: "Counter[str]") -> None:
    """Gradients among replicas; under islands links between sites carry them once every `outer_steps`."""
    for across, nbytes in synchronisation.volumes(stage):
        for group in synchronisation.groups(setting.place(stage), across):
            rare = {link.name for link in group.span.wan_links} if plan.mode == "islands" else ()
            for name, amount in collective_bytes(group.span, nbytes, 2.0, plan.codecs).items():
                carried[name] += amount * group.times / (max(1, plan.outer_steps) if name in rare else 1)  # type: ignore[assignment]


def _add_split(setting: Setting, plan: Plan, stage: Stage, carried: "Counter[str]") -> None:
    """What lanes exchange for the layers they divide: in each pass (and again where forward is recomputed) as much as an all-reduce."""
    again = setting.recomputed_stop(stage)
    nbytes = sum(setting.graph.layers[number].tensor_bytes * (3 if number < again else 2) for number in stage.split)
    for replica in stage.replicas if nbytes else ():
        span = span_of(setting.cluster, [[setting.devices[name] for name in replica.devices]], setting.calibration)
        for name, amount in collective_bytes(span, nbytes * replica.total_samples, 2.0, {}).items():
            carried[name] += amount  # type: ignore[assignment]


def _add_tied(setting: Setting, synchronisation: Synchronisation, plan: Plan, carried: "Counter[str]") -> None:
    """Gradients of parameters that several stages hold copies of."""
    places = setting.places(plan)
    for homes, nbytes in synchronisation.tied_volumes(plan):
        for group in synchronisation.tied_groups([places[s] for s in homes]):
            for name, amount in collective_bytes(group.span, nbytes, 2.0, plan.codecs).items():
                carried[name] += amount * group.times  # type: ignore[assignment]


def _add_boundaries(setting: Setting, transfers: Transfers, plan: Plan, carried: "Counter[str]") -> None:
    """Activations forth and gradients back, along the routes of the micro-batches."""
    routes = [route(tuple(row)) for row in micro_batch_counts(plan)]
    places = setting.places(plan)
    for s, here in enumerate(plan.stages[:-1]):
        both = sum(transfers.boundary_bytes(plan, here))
        for (i, j), times in Counter(zip(routes[s], routes[s + 1], strict=True)).items():
            path = transfers.path(places[s], i, places[s + 1], j)
            if path.link:
                ratio = codec_spec(plan.codecs.get(path.link, "none")).ratio(setting.element_bytes) if path.between_sites else 1.0
                carried[path.link] += both * ratio * times  # type: ignore[assignment]
