"""What a mode is to those who plan, price and report: its name, its options, what its plans may be, what it keeps under failures. Pure.

A mode's rules are one object of a class derived from `ModeRules`, whose defaults describe synchronous training that stops when one device
does and starts again from its last checkpoint. Nobody compares modes' names: whoever needs to know something asks the rules.
"""

from collections.abc import Iterable, Iterator
from math import sqrt
from typing import ClassVar, NamedTuple

import msgspec

from atoll.cluster import Cluster
from atoll.graph import Graph
from atoll.plan.plan import Mark, Plan, Problem, Replica, Schedule, Stage

__all__ = ["Failures", "ModeRules", "NoOptions", "hosts_of"]

HERE = "here"  # the cluster of a plan that was made without one: this machine
RESTART_SECONDS = 120.0  # noticing a death, rendezvous, loading the checkpoint
REPLACEMENT_SECONDS = 600.0  # until a preempted device is back or replaced; meanwhile the others work
CHECKPOINT_SECONDS = 5.0  # what an asynchronous checkpoint holds the step up for
MOST_SECONDS_BETWEEN_CHECKPOINTS = 86400.0


class Failures(NamedTuple):
    """How often a plan's devices are taken away, and how long its steps are."""

    per_hour: float  # all devices of the plan together
    step_seconds: float


class NoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of a mode without options of its own."""


class ModeRules:
    """The rules of one mode; every attribute but the first three has a default."""

    name: ClassVar[str]
    summary: ClassVar[str]  # a line for `--help`
    runtime: ClassVar[str]  # "module:object" of its `ModeRuntime`, imported when it is run, resumed or reported on

    options: ClassVar[type[msgspec.Struct]] = NoOptions
    """Its flags of `atoll run` and its section of run.json; one that is a field of Plan too changes the plan (`cli/mode_options.py`)."""

    needs_devices: ClassVar[bool] = True  # else a run takes whichever device it finds, and `plan_here` makes its plan
    most_devices: ClassVar[int | None] = None  # that a plan may use
    needs_capture: ClassVar[bool] = False  # it cannot run a model as it is written, whole on every device
    whole_stages: ClassVar[bool] = False  # a replica is one worker on one host, and every device of it has the whole stage
    whole_micro_batches: ClassVar[bool] = False  # shares are whole micro-batches, with one stage too
    under_way_per_worker: ClassVar[int] = 0  # micro-batches there are at once for every worker, where no schedule bounds them
    schedules: ClassVar[tuple[Schedule, ...]] = ("1f1b", "gpipe")  # that are searched
    most_staleness: ClassVar[int] = 0  # steps by which a reduction may lag
    reduces_after_all_stages: ClassVar[bool] = False  # no backward hides reductions: they begin when all stages have ended
    for_collaborations: ClassVar[bool] = False  # it trains what atoll.collaborate makes, part by part, and nothing else
    runs_loops: ClassVar[bool] = False  # scripts may make the steps themselves (`atoll.step`)
    sites_apart: ClassVar[bool] = False  # each site trains the whole model by itself, in a plan of its own (`plan/sites.py`)
    others_join: ClassVar[bool] = False  # while it runs, over links that no plan names
    hosts_per_stage: ClassVar[int] = 1  # on which every stage must be, for the run to go on when one host dies
    least_gain: ClassVar[float] = 1.0  # how much faster than the default mode it must be to be chosen
    starts_in_first_step: ClassVar[bool] = False  # the first step lasts from the start of the run, so it tells no speed
    keeps_borders: ClassVar[bool] = False  # it checks what sites may send (`may_send` of a cluster file) wherever something is sent
    limits: ClassVar[str] = ""  # a sentence for those who find no plan of this mode

    def is_candidate(self, cluster: Cluster) -> bool:
        """Whether plans of this mode are looked for on a cluster where no mode was asked for; the default mode's always are."""
        return False

    def plan_here(self, graph: str, batch_size: int, micro_batch_size: int) -> Plan:
        """The plan where neither devices nor a plan are given: the whole model as one layer, since nothing was captured."""
        assert not self.needs_devices
        stage = Stage(start=0, stop=1, replicas=(Replica(devices=(f"{HERE}/0",), samples=(batch_size,)),))
        return Plan(graph=graph, cluster=HERE, batch_size=batch_size, micro_batch_size=micro_batch_size, stages=(stage,), mode=self.name)

    def problems(self, plan: Plan) -> Iterator[Problem]:
        """All that keeps this mode from running a plan that is valid otherwise."""
        if plan.staleness > self.most_staleness:
            yield Problem(self._too_stale(plan), Mark("staleness"))
        if self.most_devices is not None and len({name for stage in plan.stages for name in stage.devices}) > self.most_devices:
            yield Problem(f"mode {self.name} runs on {self.most_devices} device, the plan names more", Mark("devices", 0))
        for number, stage in enumerate(plan.stages):
            yield from self.stage_problems(stage, number)

    def _too_stale(self, plan: Plan) -> str:
        if self.most_staleness:
            return f"staleness={plan.staleness}: reductions of mode {self.name} may lag by {self.most_staleness} at most"
        return f"staleness={plan.staleness}: mode {self.name} reduces gradients before the next step; leave it out"

    def stage_problems(self, stage: Stage, index: int = 0) -> Iterator[Problem]:
        """What keeps this mode from running a stage; `index` is its number in its plan."""
        return iter(())

    def why_not_graph(self, graph: Graph) -> str | None:
        """What keeps this mode from training a model; None where nothing does."""
        if not (graph.eager and self.needs_capture):
            return None
        return f"mode {self.name} cuts a captured model into stages, and {graph.name} could not be captured; train it in mode lockstep"

    def why_not(self, plan: Plan) -> str | None:
        """The first of the problems with a plan, whatever mode it says; None where this mode can run it."""
        problem = next(self.problems(plan), None)
        return problem.sentence if problem is not None else None

    def why_not_borders(self, plan: Plan, cluster: Cluster) -> str | None:
        """Why a plan cannot be run because of what sites may send; None where it can. A rule that nobody checks is no rule."""
        names = {name for stage in plan.stages for name in stage.devices}
        used = {device.site for device in cluster.devices if device.name in names}
        bound = [site.name for site in cluster.sites if site.name in used and site.may_send is not None]
        if self.keeps_borders or len(used) < 2 or not bound:
            return None
        return (
            f"site {bound[0]!r} says what may leave it (may_send), and mode {self.name} does not check what its processes send; "
            "use devices of one site, or take may_send out of the cluster file"
        )

    def runs_as_priced(self, plan: Plan) -> bool:
        """Whether the mode can run a plan, and just as it is priced."""
        broken = self.whole_micro_batches and any(
            replica.total_samples % plan.micro_batch_size for stage in plan.stages for replica in stage.replicas
        )
        return not broken and (plan.schedule in self.schedules or plan.schedule == "interleaved") and self.why_not(plan) is None

    def notes(self, plan: Plan) -> tuple[str, ...]:
        """What the mode does otherwise than a plan says, which is what predictions are of."""
        return ()

    def goodput(self, plan: Plan, failures: Failures) -> float:
        """The share of time that ends up in committed steps. Here: one device's death stops all, back to the last checkpoint."""
        rate = failures.per_hour / 3600.0
        if rate <= 0:
            return 1.0
        lost = 1 / len({name for stage in plan.stages for name in stage.devices})
        longest = min(MOST_SECONDS_BETWEEN_CHECKPOINTS, sqrt(2 * CHECKPOINT_SECONDS / rate))  # Young's interval
        interval = max(failures.step_seconds, longest)
        waste = CHECKPOINT_SECONDS / interval + rate * (interval / 2 + RESTART_SECONDS + lost * REPLACEMENT_SECONDS)
        return 1.0 / (1.0 + waste)

    def survives(self, plan: Plan) -> bool:
        """Whether the run goes on when any one host dies."""
        return all(len(hosts_of(stage.devices)) >= self.hosts_per_stage for stage in plan.stages)


def hosts_of(devices: Iterable[str]) -> set[str]:
    """The hosts that devices are on, by their names."""
    return {device.rpartition("/")[0] for device in devices}
