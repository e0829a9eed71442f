"""Rules: what the annotations leave open to the planner."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from atoll.cluster import Cluster
from atoll.errors import AnnotationError
from atoll.graph import Constraint, Graph, check_constraints
from atoll.graph.constraints import describe
from atoll.plan import CodecName, Plan, Schedule, Stage
from atoll.plan.constraints import constraint_problems, micro_batches_asked, stage_problems
from atoll.plan.modes import ModeRules, hosts_of
from atoll.plan.validate import parallelism_problems, sample_problems, share_problems

__all__ = ["Rules", "rules_of"]

_HEAVY = 0.3  # of all parameters: a layer that holds so many is worth dividing while the rest is repeated


class Rules(NamedTuple):
    """Constraints in the planner's own terms. Whatever the searches do, a plan is kept only where `allows` says so."""

    graph: Graph
    execution: ModeRules  # only plans of this mode, and such as it runs as they are priced
    cuts: tuple[int, ...]  # where a stage may end: legal cuts outside of annotated stages
    bounds: tuple[int, ...] | None = None  # the boundaries to begin with, where stages were annotated
    micro_batches: tuple[int, ...] = ()  # numbers of micro-batches that were asked for; () leaves them free
    counts: tuple[int, ...] = ()  # numbers of devices that replicas and splits name, ascending
    split: tuple[int, ...] = ()  # layers whose tensors must be divided and can be
    said: tuple[str, ...] = ()  # what was asked, for the reasons
    hosts: int = 1  # that every stage must be on at least
    codecs: tuple[tuple[str, CodecName], ...] = ()  # of all links between sites, where one was asked for

    def make_plan(
        self, cluster: Cluster, batch_size: int, micro_batch_size: int, stages: Iterable[Stage], schedule: Schedule = "1f1b"
    ) -> Plan:
        """A plan of the mode asked for, with the codecs asked for."""
        return Plan(
            graph=self.graph.name,
            cluster=cluster.name,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            stages=tuple(stages),
            mode=self.execution.name,
            schedule=schedule,
            codecs=dict(self.codecs),
        )

    def any_share(self, stages: int) -> bool:
        """Whether replicas may take any number of samples: with one stage nothing is routed, but some modes hand out micro-batches."""
        return stages == 1 and not self.execution.whole_micro_batches

    def allows(self, plan: Plan) -> bool:
        """Whether a plan is one of those that are looked for."""
        return self.why_not(plan) is None

    def why_not(self, plan: Plan) -> str | None:
        """None where a plan honours every annotation, its stages divide only what they have, and it can run in the mode asked for."""
        for stage in plan.stages:
            if stage.split and not (stage.start <= stage.split[0] and stage.split[-1] < stage.stop):
                return "not as annotated"
            if not self.divides(stage):
                return "not as annotated"
        if self.graph.constraints and next(constraint_problems(plan, self.graph), None) is not None:
            return "not as annotated"
        if next(sample_problems(plan, self.graph), None) is not None:
            return f"the job was captured for {self.graph.fixed_samples} samples at a time"
        if not self.execution.runs_as_priced(plan):
            return f"not for mode {self.execution.name}"
        if self.hosts > 1 and any(len(hosts_of(stage.devices)) < self.hosts for stage in plan.stages):
            return "a stage on too few hosts"
        return None

    def divides(self, stage: Stage) -> bool:
        """Whether a stage's layers can be divided as it says."""
        return next(parallelism_problems(self.graph, stage), None) is None and next(share_problems(self.graph, stage), None) is None

    def allows_stage(self, stage: Stage) -> bool:
        """Whether a stage honours the replicas and splits in it, and can run in the mode asked for."""
        if next(self.execution.stage_problems(stage), None) is not None:
            return False
        return not self.graph.constraints or next(stage_problems(stage, self.graph), None) is None

    def may_hold(self, start: int, stop: int) -> bool:
        """Whether one stage may run these layers: of annotated stages, one at most."""
        if self.bounds is None:
            return True
        inside = [c for c in self.graph.constraints if c.kind == "stage" and any(start <= layer < stop for layer in c.layers)]
        return len(inside) < 2

    @property
    def worth_splitting(self) -> tuple[int, ...]:
        """Layers that lanes might divide while they repeat the rest: those annotated so, else those that hold much of the model."""
        heavy = (i for i, layer in enumerate(self.graph.layers) if layer.split_parameters >= _HEAVY * max(1, self.graph.parameters))
        return () if self.execution.whole_stages else self.split or tuple(heavy)

    def micro_batch_sizes(self, batch_size: int) -> list[int] | None:
        """Micro-batches that make the numbers asked for, or that can be computed at all; None where they are free."""
        if self.graph.fixed_samples is not None:
            return [self.graph.fixed_samples]
        if not self.micro_batches:
            return None
        return sorted({batch_size // number for number in self.micro_batches if batch_size % number == 0})


def rules_of(graph: Graph, device_count: int, execution: ModeRules) -> Rules:
    """Reads the annotations of a graph; AnnotationError where they contradict each other or need more devices."""
    check_constraints(graph, device_count)
    stages = [constraint for constraint in graph.constraints if constraint.kind == "stage"]
    annotated = {layer for c in graph.constraints if c.kind == "split" and c.devices != 1 for layer in c.layers}
    splits = [layer for layer in annotated if graph.layers[layer].tensor_units > 1 and not graph.layers[layer].experts]
    return Rules(
        graph=graph,
        execution=execution,
        cuts=tuple(cut for cut in graph.cuts if not any(cut - 1 in stage.layers and cut in stage.layers for stage in stages)),
        bounds=_stage_bounds(graph, stages) if stages else None,
        micro_batches=micro_batches_asked(graph),
        counts=tuple(sorted({c.devices for c in graph.constraints if c.devices})),
        split=tuple(sorted(splits)),
        said=tuple(dict.fromkeys(describe(constraint) for constraint in graph.constraints)),
    )


def _stage_bounds(graph: Graph, stages: list[Constraint]) -> tuple[int, ...]:
    """Boundaries of annotated stages: each ends at the legal cut closest before the next one's first layer."""
    ordered = sorted(stages, key=lambda stage: min(stage.layers))
    bounds = [0]
    for here, there in pairwise(ordered):
        last, first = max(here.layers), min(there.layers)
        cuts = [cut for cut in graph.cuts if last < cut <= first]
        if not cuts:
            raise AnnotationError(
                f"{there.where}: this stage begins at layer '{graph.layers[first].name}', but the model cannot be cut between it "
                f"and the stage at {here.where}; annotate whole blocks"
            )
        bounds.append(cuts[-1])
    return (*bounds, len(graph.layers))
