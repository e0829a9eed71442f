"""Gradient synchronisation: who agrees with whom once a step, over which links, and how long it takes when all stages do so at once."""

from atoll.cluster import Device
from atoll.cost.communication import Span, all_reduce_seconds, span_of
from atoll.cost.setting import Setting
from atoll.plan import Plan, Stage

__all__ = ["Synchronisation"]


class Synchronisation:
    """Synchronisation times of any plan; where groups live is remembered."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._spans: dict[tuple[object, ...], Span | None] = {}

    def groups(self, stage: Stage, across_lanes: bool) -> list[list[Device]]:
        """Devices that hold the same parameters: over replicas, and over lanes too where lanes repeat them."""
        lanes, tensor = stage.lanes, stage.tensor
        rows = [[self._setting.devices[name] for name in replica.devices] for replica in stage.replicas]
        if across_lanes:
            return [[row[lane * tensor + p] for row in rows for lane in range(lanes)] for p in range(tensor)]
        return [[row[i] for row in rows] for i in range(lanes * tensor)]

    def span(self, stage: Stage, across_lanes: bool, site: str = "") -> Span | None:
        """Where the first such group lives (within one site, if named); None where it has one member."""
        key = (stage.replicas, stage.tensor, across_lanes, site)
        if key not in self._spans:
            groups = self.groups(stage, across_lanes)
            if site:
                groups = [kept for group in groups if (kept := [device for device in group if device.site == site])]
            span = span_of(self._setting.cluster, groups, self._setting.calibration) if groups else None
            self._spans[key] = span if span is not None and span.members > 1 else None
        return self._spans[key]

    def volumes(self, stage: Stage) -> list[tuple[bool, float]]:
        """(across lanes?, bytes of gradient) that each device of a stage reduces once a step."""
        held = self._setting.held(stage, stage.replicas[0], 0)
        size = self._setting.calibration.gradient_bytes
        lanes = stage.lanes
        volumes = [(False, held.dense * size / lanes)] if stage.sharded else [(lanes > 1, held.dense * size)]
        if held.expert and stage.expert:
            volumes.append((False, held.expert * size))
        elif held.expert:
            volumes = [(volumes[0][0], volumes[0][1] + held.expert * size / (lanes if stage.sharded else 1))]
        return volumes

    def seconds(self, plan: Plan) -> list[float]:
        """Seconds each stage's replicas need to agree on their gradients, all stages at once."""
        return [sum(self._stage(plan, stage, across, nbytes) for across, nbytes in self.volumes(stage)) for stage in plan.stages]

    def _stage(self, plan: Plan, stage: Stage, across: bool, nbytes: float) -> float:
        span = self.span(stage, across)
        if span is None:
            return 0.0
        calibration = self._setting.calibration
        whole = all_reduce_seconds(self._contended(plan, span), nbytes, calibration, plan.codecs)
        if plan.mode != "islands" or not span.wan_links:
            return whole
        inside = 0.0
        for site in span.site_names:
            local = self.span(stage, across, site)
            if local is not None:
                inside = max(inside, all_reduce_seconds(self._contended(plan, local), nbytes, calibration, plan.codecs))
        return inside + whole / max(1, plan.outer_steps)

    def _contended(self, plan: Plan, span: Span) -> Span:
        """Stages that leave the same host or site synchronise at the same time and share its way out."""
        if len(plan.stages) == 1:
            return span
        same_host = same_wan = 0
        for other in plan.stages:
            theirs = self.span(other, other.lanes > 1 and not other.sharded)
            if theirs is None:
                continue
            same_host += theirs.site.members > 1 and theirs.host_name == span.host_name
            same_wan += bool(theirs.wan_links) and not set(theirs.wan_links).isdisjoint(span.wan_links)
        site = span.site._replace(sharing=span.site.sharing * max(1, same_host))
        return span._replace(site=site, wan=span.wan._replace(sharing=span.wan.sharing * max(1, same_wan)))

    def tied(self, plan: Plan) -> list[float]:
        """Seconds each stage spends on gradients of parameters it shares with other stages."""
        setting = self._setting
        seconds = [0.0] * len(plan.stages)
        for shared in setting.graph.shared:
            homes = sorted({s for s, stage in enumerate(plan.stages) for layer in shared.layers if stage.start <= layer < stage.stop})
            if len(homes) < 2:
                continue
            first = [setting.devices[plan.stages[s].replicas[0].devices[0]] for s in homes]
            span = span_of(setting.cluster, [first], setting.calibration)
            nbytes = shared.parameters * setting.calibration.gradient_bytes / plan.stages[homes[0]].tensor
            taken = all_reduce_seconds(span, nbytes, setting.calibration, plan.codecs)
            for s in homes:
                seconds[s] += taken
        return seconds
