"""What a swarm can run of what a plan can say.

A swarm's worker is a replica: devices of one host, each with the whole stage, that share the samples of every micro-batch. So nothing is
divided inside a stage; were it sharded, no device would have a state to give to those who join. Codecs are chosen by `atoll run --codec`
for all links, since those who join use links that no plan knows; sums always travel as they are.
"""

from collections.abc import Iterable, Iterator

from atoll.plan.plan import Plan, Stage
from atoll.plan.table import Mark, Problem
from atoll.units import plural

__all__ = ["hosts_of", "swarm_notes", "swarm_problems", "swarm_stage_problems", "why_not_swarm"]

_MOST_STALENESS = 1


def why_not_swarm(plan: Plan) -> str | None:
    """Why no swarm can run a plan, whatever mode it says; None where one can."""
    problem = next(swarm_problems(plan), None)
    return problem.sentence if problem is not None else None


def swarm_problems(plan: Plan) -> Iterator[Problem]:
    """All that keeps a swarm from running a plan that is valid otherwise."""
    if plan.staleness > _MOST_STALENESS:
        sentence = f"staleness={plan.staleness}: a swarm's sums may lag by one step at most; write staleness=1 or 0"
        yield Problem(sentence, Mark("staleness"))
    for link, codec in plan.codecs.items():
        if codec != "none":
            sentence = f"codec {codec} on {link}: a swarm takes none from its plan; leave it out, and give `atoll run --codec {codec}`"
            yield Problem(sentence, Mark(f"codec {link}"))
    for number, stage in enumerate(plan.stages):
        yield from swarm_stage_problems(stage, number)
    yield from _other_company(plan)


def swarm_stage_problems(stage: Stage, index: int = 0) -> Iterator[Problem]:
    """What keeps a swarm from running a stage; `index` is its number in its plan."""
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


def _other_company(plan: Plan) -> Iterator[Problem]:
    """Devices that several stages name, each time with others."""
    together: dict[str, tuple[str, ...]] = {}
    for index, stage in enumerate(plan.stages):
        for number, replica in enumerate(stage.replicas):
            for position, device in enumerate(replica.devices):
                if together.setdefault(device, replica.devices) != replica.devices:
                    sentence = f"stage {index}: {device} works with other devices than in an earlier stage"
                    yield Problem(f"{sentence}; a swarm's worker has the same in all", Mark("devices", index, number, position))


def swarm_notes(plan: Plan) -> tuple[str, ...]:
    """What a swarm does otherwise than a plan says, which is what predictions are of."""
    found = []
    if plan.schedule == "gpipe":
        found.append("schedule=gpipe: a swarm's workers run backwards first, as under 1f1b; the prediction is of gpipe")
    size, workers = plan.micro_batch_size, max(len(stage.replicas) for stage in plan.stages)
    broken = [replica for stage in plan.stages for replica in stage.replicas if replica.total_samples % size]
    if plan.micro_batches < workers:
        few = plural(plan.micro_batches, "micro-batch", "micro-batches")
        idle = f"{few} of at most {size} samples for {plural(workers, 'worker')} of a stage"
        found.append(f"{idle}: a swarm hands out whole ones, so some have nothing to do; the prediction is of shares as the plan has them")
    elif len(broken) > 1:
        found.append(f"a swarm hands out whole micro-batches of {size} samples; the prediction is of shares as the plan has them")
    return tuple(found)


def hosts_of(devices: Iterable[str]) -> set[str]:
    """The hosts that devices are on, by their names."""
    return {device.rpartition("/")[0] for device in devices}
