"""Bytes that replicas exchange inside themselves: tensor parallelism, experts, sharded parameters."""

from collections import Counter

from atoll.cluster import Device
from atoll.cost.communication import Span, collective_bytes, span_of
from atoll.cost.setting import Setting
from atoll.plan import Plan, Replica, Stage

__all__ = ["add_inside"]


def add_inside(setting: Setting, plan: Plan, stage: Stage, carried: "Counter[str]") -> None:
    """Adds what every replica of a stage exchanges inside itself in one step."""
    for replica in stage.replicas:
        devices = [setting.devices[name] for name in replica.devices]
        if stage.tensor > 1:
            _add_tensor(setting, stage, replica, devices, carried)
        lanes = len(devices) // stage.tensor
        if lanes > 1 and (stage.expert or stage.sharded):
            for position in range(stage.tensor):
                group = devices[position :: stage.tensor]
                span = span_of(setting.cluster, [group], setting.calibration)
                if stage.sharded:
                    _add_gathers(setting, plan, stage, replica, span, carried)
                if stage.expert:
                    _add_exchanges(setting, stage, replica, group, carried)


def _add(carried: "Counter[str]", more: dict[str, float]) -> None:
    for name, nbytes in more.items():
        carried[name] += nbytes  # type: ignore[assignment]


def _add_tensor(setting: Setting, stage: Stage, replica: Replica, devices: list[Device], carried: "Counter[str]") -> None:
    """All-reduces forward and backward, and again where forward is recomputed."""
    amounts = setting.amounts.tensor_bytes
    again = setting.recomputed_stop(stage)
    nbytes = 2 * (amounts[stage.stop] - amounts[stage.start]) + (amounts[again] - amounts[stage.start])
    for lane, samples in enumerate(replica.samples):
        members = devices[lane * stage.tensor : (lane + 1) * stage.tensor]
        _add(carried, collective_bytes(span_of(setting.cluster, [members], setting.calibration), nbytes * samples, 2.0, {}))


def _add_gathers(setting: Setting, plan: Plan, stage: Stage, replica: Replica, span: Span, carried: "Counter[str]") -> None:
    """Parameters in forward and in backward, and their gradients scattered, for every micro-batch."""
    lanes = len(replica.samples)
    held = setting.held_with(stage, 1 / stage.tensor, lanes)
    rounds = -(-replica.total_samples // plan.micro_batch_size)
    nbytes = held.dense * (2 * setting.element_bytes + setting.calibration.gradient_bytes) * rounds
    _add(carried, collective_bytes(span, nbytes, 1.0, {}))


def _add_exchanges(setting: Setting, stage: Stage, replica: Replica, group: list[Device], carried: "Counter[str]") -> None:
    """Tokens to the experts and back, forward and backward (and again where forward is recomputed), by where the experts live."""
    amounts = setting.amounts.expert_bytes
    times = 6 if stage.recompute else 4
    pair = times * (amounts[stage.stop] - amounts[stage.start]) * replica.total_samples / stage.tensor / len(group) ** 2
    in_host = Counter(device.host for device in group)
    carried["inside hosts"] += pair * sum(n * (n - 1) for n in in_host.values())  # type: ignore[assignment]
    for site, n in Counter(device.site for device in group).items():
        hosts = {device.host for device in group if device.site == site}
        carried[site] += pair * (n * n - sum(in_host[host] ** 2 for host in hosts))  # type: ignore[assignment]
    _add_between_sites(setting, group, pair, carried)


def _add_between_sites(setting: Setting, group: list[Device], pair: float, carried: "Counter[str]") -> None:
    sites = Counter(device.site for device in group)
    for link in setting.cluster.links:
        a, b = link.between
        if sites[a] and sites[b]:
            carried[link.name] += 2 * pair * sites[a] * sites[b]  # type: ignore[assignment]
