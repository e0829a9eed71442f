"""What a swarm can run of what a plan can say.

A swarm's worker is a replica: devices of one host, each with the whole stage, that share the samples of every micro-batch. So nothing is
divided inside a stage; were it sharded, no device would have a state to give to those who join. Between workers of the plan links have the
plan's codecs; those who join use links that no plan knows, and what `atoll run --codec` says. Sums always travel as they are.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.cluster import Cluster
from atoll.plan.modes.rules import REPLACEMENT_SECONDS, Failures, ModeRules, hosts_of
from atoll.plan.plan import Mark, Plan, Problem, Stage
from atoll.units import plural

__all__ = ["SWARM", "Swarm", "SwarmOptions"]

REBALANCE_SECONDS = 60.0  # until workers have moved to a stage that lost one
OVERHEAD = 0.05  # routing, seals and manifests, against lockstep on the same layout


class SwarmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm's own options of `atoll run`, and its section of run.json."""

    listen: Annotated[
        str | None,
        Meta(
            description="Where the coordinator listens; others join there.",
            extra={"metavar": "HOST:PORT", "only": "only a swarm has others join"},
        ),
    ] = None
    nats: Annotated[
        str | None,
        Meta(
            description="Keep the journal on these NATS servers, so that another can coordinate.",
            extra={"metavar": "URL,…", "only": "only a swarm has a journal"},
        ),
    ] = None
    standby: Annotated[
        tuple[str, ...],
        Meta(
            description="With --nats: where `atoll standby` will listen; may be repeated.",
            extra={"metavar": "HOST:PORT", "only": "only a swarm has a coordinator to stand by for"},
        ),
    ] = ()
    staleness: Annotated[
        int | None,
        Meta(
            description="With 1, gradients of a step are reduced while the next one is computed.",
            extra={"min": 0, "max": 1, "only": "only the swarm overlaps gradient reduction with the next step"},
        ),
    ] = None


class Swarm(ModeRules):
    """For devices that come and go, unequal or far apart."""

    name = "swarm"
    summary = "randomised pipelines that go on when machines leave and join"
    runtime = "atoll.runtime.modes.swarm.runtime:SwarmRuntime"
    options = SwarmOptions
    needs_capture = True
    whole_stages = True
    whole_micro_batches = True
    under_way_per_worker = 3  # one in hand, one waiting, one on its way (`control/coordinator.py`)
    schedules = ("1f1b",)
    most_staleness = 1
    reduces_after_all_stages = True
    others_join = True
    hosts_per_stage = 2
    least_gain = 1.05  # its overhead is an estimate too
    starts_in_first_step = True
    limits = "A swarm's workers hold whole stages, on one host each: nothing inside a stage is divided. "

    def is_candidate(self, cluster: Cluster) -> bool:
        """Where machines may be taken away, and there are others."""
        return len(cluster.hosts) > 1 and any(device.preemptions_per_hour for device in cluster.devices)

    def problems(self, plan: Plan) -> Iterator[Problem]:
        """All that keeps a swarm from running a plan that is valid otherwise."""
        if plan.staleness > self.most_staleness:
            sentence = f"staleness={plan.staleness}: a swarm's reductions may lag by one step at most; write staleness=1 or 0"
            yield Problem(sentence, Mark("staleness"))
        for number, stage in enumerate(plan.stages):
            yield from self.stage_problems(stage, number)
        yield from _other_company(plan)

    def stage_problems(self, stage: Stage, index: int = 0) -> Iterator[Problem]:
        """What is divided inside a stage, and replicas on several hosts."""
        if stage.tensor > 1 or stage.expert or stage.split:
            sentence = (
                f"stage {index}: a swarm's worker holds a whole stage by itself; tensor, expert and split parallelism inside stages are "
                "not run in swarm mode"
            )
            yield Problem(sentence, Mark("inside", index))
        elif stage.sharded:
            yield Problem(f"stage {index}: a swarm's worker holds a whole stage by itself; leave out `sharded`", Mark("inside", index))
        for number, replica in enumerate(stage.replicas):
            hosts = hosts_of(replica.devices)
            if len(hosts) > 1:
                where = f"a replica is on {' and '.join(sorted(hosts))}; make them {len(hosts)} replicas"
                yield Problem(f"stage {index}: a swarm's worker is on one host, but {where}", Mark("devices", index, number))

    def notes(self, plan: Plan) -> tuple[str, ...]:
        """Schedules and shares that a swarm has its own way with."""
        found = []
        if plan.schedule == "gpipe":
            found.append("schedule=gpipe: a swarm's workers run backwards first, as under 1f1b; the prediction is of gpipe")
        size, workers = plan.micro_batch_size, max(len(stage.replicas) for stage in plan.stages)
        broken = [replica for stage in plan.stages for replica in stage.replicas if replica.total_samples % size]
        if plan.micro_batches < workers:
            few = plural(plan.micro_batches, "micro-batch", "micro-batches")
            idle = f"{few} of at most {size} samples for {plural(workers, 'worker')} of a stage"
            shares = "the prediction is of shares as the plan has them"
            found.append(f"{idle}: a swarm hands out whole ones, so some have nothing to do; {shares}")
        elif len(broken) > 1:
            found.append(f"a swarm hands out whole micro-batches of {size} samples; the prediction is of shares as the plan has them")
        return tuple(found)

    def goodput(self, plan: Plan, failures: Failures) -> float:
        """A death takes one replica away until it is replaced, and a part of its stage until the swarm has rebalanced."""
        devices = len({name for stage in plan.stages for name in stage.devices})
        lost = max(stage.lanes * stage.tensor for stage in plan.stages) / devices
        lost_of_stage = 1 / min(len(stage.replicas) for stage in plan.stages)
        waste = failures.per_hour / 3600.0 * (lost * (failures.step_seconds + REPLACEMENT_SECONDS) + lost_of_stage * REBALANCE_SECONDS)
        return (1.0 - OVERHEAD) / (1.0 + waste)


def _other_company(plan: Plan) -> Iterator[Problem]:
    """Devices that several stages name, each time with others."""
    together: dict[str, tuple[str, ...]] = {}
    for index, stage in enumerate(plan.stages):
        for number, replica in enumerate(stage.replicas):
            for position, device in enumerate(replica.devices):
                if together.setdefault(device, replica.devices) != replica.devices:
                    sentence = f"stage {index}: {device} works with other devices than in an earlier stage"
                    yield Problem(f"{sentence}; a swarm's worker has the same in all", Mark("devices", index, number, position))


SWARM = Swarm()
