"""Transfers between neighbouring stages: what one micro-batch puts on the way from one replica to another."""

from typing import NamedTuple

from atoll.codec import codec_spec
from atoll.cost.setting import Setting
from atoll.plan import Plan, Replica, Stage

__all__ = ["Flow", "flow_between"]


class Flow(NamedTuple):
    """A transfer between two replicas before contention: bytes on the wire, rate, latency, codec time, and the link it queues for."""

    wire_bytes: float
    bytes_per_s: float
    latency: float
    codec: float
    resource: tuple[str, ...]  # () where nothing is shared


def flow_between(setting: Setting, plan: Plan, here: Stage, a: Replica, there: Stage, b: Replica, forth: bool) -> Flow:
    """One micro-batch's tensors from replica a of a stage to replica b of its neighbour: activations forth, gradients back."""
    boundary = setting.graph.layers[(here if forth else there).stop - 1]
    nbytes = (boundary.output_bytes if forth else boundary.gradient_bytes) * plan.micro_batch_size
    sender, receiver = setting.devices[a.devices[0]], setting.devices[b.devices[0]]
    if sender.name == receiver.name:
        return Flow(0.0, 1.0, 0.0, 0.0, ())
    link = setting.cluster.link_between(sender, receiver)
    if sender.host == receiver.host:
        return Flow(nbytes, link.bytes_per_s * setting.calibration.host_link_efficiency, link.latency_s, 0.0, ())
    rate = link.bytes_per_s * setting.calibration.network_efficiency
    if sender.site == receiver.site:
        return Flow(nbytes, rate, link.latency_s, 0.0, (sender.host, receiver.site))
    spec = codec_spec(plan.codecs.get(link.name, "none"))
    passes = spec.memory_passes * nbytes / len(a.devices)
    slowest = min(sender.kind.memory_bytes_per_s * sender.speed, receiver.kind.memory_bytes_per_s * receiver.speed)
    codec = passes / (slowest * setting.calibration.memory_efficiency)
    return Flow(nbytes * spec.ratio(setting.element_bytes), rate, link.latency_s, codec, (sender.site, receiver.site))
