"""The rules of a Plan. `validate` raises a `PlanError` that says in a sentence what is wrong and shows the table with that cell marked.

Decisions the rules rest on:
- A plan belongs to the graph and the cluster it names; another name is an error, since layer numbers would mean other layers.
- Lanes that neither shard nor divide experts repeat the parameters; that is allowed (data parallelism inside a replica).
- All replicas of a stage have the same `lanes × tensor`. A lane may take no samples (it still holds its shard), a replica may not.
- With several stages a replica takes whole micro-batches; when `batch_size` is not a multiple, one replica takes the smaller last one.
- Under tensor parallelism, layers that cannot be split are repeated on every device; a stage with nothing to split is an error.
- Tensor shares deal out whole units (`plan/division.py`): where a layer's units do not divide by `tensor`, a replica must say its shares.
- Lanes split a layer in parts as equal as its units allow; they do so only where `tensor` is 1, and not where they divide its experts.
- A plan says only what its mode can run (`plan/modes/`).
- Memory is not a rule but a prediction: `Cost.over_memory` says what does not fit.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator
from math import gcd

from atoll.cluster import Cluster
from atoll.cluster.cluster import device_index
from atoll.errors import PlanError
from atoll.graph import Graph
from atoll.plan.constraints import constraint_problems
from atoll.plan.division import even_shares, split_units
from atoll.plan.modes import mode_rules
from atoll.plan.plan import Mark, Plan, Problem, Stage
from atoll.plan.table import stage_table
from atoll.plan.text import numbers_text

__all__ = ["parallelism_problems", "sample_problems", "share_problems", "validate"]


def validate(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None, *, source: object = None) -> None:
    """Raise `PlanError` for the first rule the plan breaks, by itself and, where they are given, with its graph and cluster.

    It begins with `source`, the file the plan is from, if that is given.
    """
    checks: list[Callable[[], Iterable[Problem]]] = [
        lambda: _fields(plan),
        lambda: _layers(plan),
        lambda: _replicas(plan),
        lambda: _devices(plan),
        lambda: mode_rules(plan.mode).problems(plan),
    ]
    if cluster is not None:
        checks.append(lambda: _against_cluster(plan, cluster))
    if graph is not None:
        checks += [
            lambda: _in_mode(plan, graph),
            lambda: _against_graph(plan, graph),
            lambda: constraint_problems(plan, graph),
            lambda: _whole_units(plan, graph),
            lambda: sample_problems(plan, graph),
        ]
    for check in checks:  # each may rely on those before it having found nothing
        for problem in check():
            where = f"{source}: " if source is not None else ""
            raise PlanError(f"{where}{problem.sentence}\n\n{stage_table(plan, problem.mark)}")


def sample_problems(plan: Plan, graph: Graph) -> Iterator[Problem]:
    """Devices that would get another number of samples at a time than the job could be captured for."""
    fixed = graph.fixed_samples
    if fixed is None or not mode_rules(plan.mode).needs_devices:  # one process runs the model itself
        return
    for index, stage in enumerate(plan.stages):
        for number, replica in enumerate(stage.replicas):
            rounds = -(-replica.total_samples // plan.micro_batch_size)
            if any(samples != fixed * rounds for samples in replica.samples):
                yield Problem(
                    f"stage {index}, replica {number}: {graph.name} could be captured for {fixed} samples at a time only; choose shares "
                    "and a micro_batch that give every device as many",
                    Mark("samples", index, number),
                )


def _in_mode(plan: Plan, graph: Graph) -> Iterator[Problem]:
    why_not = mode_rules(plan.mode).why_not_graph(graph)
    if why_not is not None:
        yield Problem(why_not, Mark("mode"))


def _fields(plan: Plan) -> Iterator[Problem]:
    for column, number, least in (
        ("batch", plan.batch_size, 1),
        ("micro_batch", plan.micro_batch_size, 1),
        ("staleness", plan.staleness, 0),
    ):
        if number < least:
            yield Problem(f"{column} must be at least {least}, got {number}", Mark(column))
    if plan.micro_batch_size > plan.batch_size:
        yield Problem(f"a micro-batch of {plan.micro_batch_size} is larger than the batch of {plan.batch_size}", Mark("micro_batch"))
    if not plan.stages:
        yield Problem("the plan has no stage", Mark("stages"))


def _layers(plan: Plan) -> Iterator[Problem]:
    expected = 0
    for index, stage in enumerate(plan.stages):
        mark = Mark("layers", index)
        if stage.start < 0 or stage.stop <= stage.start:
            yield Problem(f"stage {index} has no layers: it runs from {stage.start} to {stage.stop - 1}", mark)
        elif stage.start > expected:
            missing = f"layer {expected} is" if stage.start == expected + 1 else f"layers {expected}-{stage.start - 1} are"
            yield Problem(f"{missing} in no stage: stage {index} begins at layer {stage.start}", mark)
        elif stage.start < expected:
            how = "out of order" if stage.stop <= plan.stages[index - 1].start else "overlapping"
            yield Problem(
                f"stages {index - 1} and {index} are {how}: stage {index} must begin at layer {expected}, not {stage.start}", mark
            )
        expected = stage.stop


def _replicas(plan: Plan) -> Iterator[Problem]:
    for index, stage in enumerate(plan.stages):
        if stage.tensor < 1:
            yield Problem(f"stage {index}: tensor must be at least 1, got {stage.tensor}", Mark("inside", index))
        elif not stage.replicas:
            yield Problem(f"stage {index} has no replica to run its layers", Mark("replicas", index))
        else:
            yield from _replica_shapes(index, stage)
            yield from _shares_of_batch(plan, index, stage)


def _replica_shapes(index: int, stage: Stage) -> Iterator[Problem]:
    size = len(stage.replicas[0].devices)
    for number, replica in enumerate(stage.replicas):
        name = f"stage {index}, replica {number}"
        count, lanes = len(replica.devices), len(replica.samples)
        if count == 0 or count % stage.tensor:
            yield Problem(f"{name}: {count} devices do not form lanes of tensor={stage.tensor}", Mark("replicas", index, number))
        elif count != size:
            yield Problem(f"{name}: it has {count} devices but replica 0 has {size}", Mark("replicas", index, number))
        elif lanes != count // stage.tensor:
            expected = f"{count // stage.tensor} lanes of {stage.tensor}"
            yield Problem(f"{name}: {count} devices are {expected}, but samples has {lanes} entries", Mark("samples", index, number))
        shares = replica.tensor_shares
        if shares and len(shares) != stage.tensor:
            yield Problem(f"{name}: {len(shares)} tensor shares for tensor={stage.tensor}", Mark("shares", index, number))
        elif any(share < 1 for share in shares):
            yield Problem(f"{name}: tensor shares must be at least 1", Mark("shares", index, number))
    for flag in ("sharded", "expert"):
        if getattr(stage, flag) and stage.lanes < 2:
            yield Problem(f"stage {index} is {flag} but a replica has one lane, so there is nothing to divide", Mark("inside", index))
    yield from _split_layers(index, stage)


def _split_layers(index: int, stage: Stage) -> Iterator[Problem]:
    mark = Mark("inside", index)
    if stage.split and stage.lanes < 2:
        yield Problem(f"stage {index} has split layers, but a replica has one lane, so nobody divides them", mark)
    if stage.split and stage.tensor > 1:
        yield Problem(f"stage {index} has split layers and tensor={stage.tensor}; lanes divide layers only where tensor=1", mark)
    if list(stage.split) != sorted(set(stage.split)):
        yield Problem(f"stage {index}: split layers must ascend, got {numbers_text(stage.split)}", mark)
    outside = [layer for layer in stage.split if not stage.start <= layer < stage.stop]
    if outside:
        yield Problem(f"stage {index} runs layers {stage.start}-{stage.stop - 1}, but splits layer {outside[0]}", mark)


def _shares_of_batch(plan: Plan, index: int, stage: Stage) -> Iterator[Problem]:
    broken = []
    for number, replica in enumerate(stage.replicas):
        if any(samples < 0 for samples in replica.samples):
            yield Problem(f"stage {index}, replica {number}: samples must not be negative", Mark("samples", index, number))
        elif replica.total_samples == 0:
            yield Problem(f"stage {index}, replica {number}: it takes no samples; leave its devices out", Mark("samples", index, number))
        if replica.total_samples % plan.micro_batch_size:
            broken.append(number)
    total = sum(replica.total_samples for replica in stage.replicas)
    if total != plan.batch_size:
        yield Problem(f"stage {index}: its replicas take {total} samples, but the batch has {plan.batch_size}", Mark("of batch", index))
    if len(plan.stages) > 1 and len(broken) > 1:
        replica = stage.replicas[broken[-1]]
        whole = f"with several stages a replica takes whole micro-batches of {plan.micro_batch_size}, not {replica.total_samples} samples"
        yield Problem(f"stage {index}, replica {broken[-1]}: {whole}", Mark("samples", index, broken[-1]))


def _devices(plan: Plan) -> Iterator[Problem]:
    home: dict[str, int] = {}  # the first stage each device was seen in
    for index, stage in enumerate(plan.stages):
        here: dict[str, int] = {}
        shared = {home[device] for device in stage.devices if device in home}
        reasons = {other: _may_not_share(plan, other, index) for other in shared}
        for number, replica in enumerate(stage.replicas):
            for position, device in enumerate(replica.devices):
                mark = Mark("devices", index, number, position)
                if device in here:
                    yield Problem(f"stage {index}: device {device!r} is in replica {here[device]} and again in replica {number}", mark)
                elif device in home and reasons[home[device]]:
                    yield Problem(f"device {device!r} is in stage {home[device]} and in stage {index}; {reasons[home[device]]}", mark)
                here[device] = number
        home = {**dict.fromkeys(here, index), **home}


def _may_not_share(plan: Plan, a: int, b: int) -> str:
    """Why these stages may not name the same devices, or `""` when they are virtual stages of one another, or workers hold whole ones."""
    if plan.schedule != "interleaved":
        return f"stages share devices only under schedule interleaved, not {plan.schedule}"
    groups = [{frozenset(replica.devices) for replica in plan.stages[index].replicas} for index in (a, b)]
    alike = mode_rules(plan.mode).whole_stages or groups[0] == groups[1]
    return "" if alike else "stages that share devices must have the same replicas"


def _against_cluster(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    if plan.cluster != cluster.name:
        yield Problem(f"the plan was made for cluster {plan.cluster!r}, not {cluster.name!r}", Mark("cluster"))
    known = device_index(cluster)
    for index, stage in enumerate(plan.stages):
        for number, replica in enumerate(stage.replicas):
            for position, device in enumerate(replica.devices):
                if device not in known:
                    sentence = f"stage {index}: the cluster has no device {device!r}{_nearest(device, known)}"
                    yield Problem(sentence, Mark("devices", index, number, position))
    links = {link.name for link in cluster.links}
    for link in plan.codecs:
        if link in links:
            continue
        inside = {site.link.name for site in cluster.sites} | {host.link.name for host in cluster.hosts}
        why = "is inside a site" if link in inside else "is not in the cluster"
        yield Problem(f"codecs: {link!r} {why}; codecs are for links between sites{_nearest(link, links)}", Mark(f"codec {link}"))


def _nearest(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _against_graph(plan: Plan, graph: Graph) -> Iterator[Problem]:
    if plan.graph != graph.name:
        yield Problem(f"the plan was made for graph {plan.graph!r}, not {graph.name!r}", Mark("graph"))
    last, count = len(plan.stages) - 1, len(graph.layers)
    if plan.stages[-1].stop != count:
        stop = plan.stages[-1].stop
        wrong = f"layers {stop}-{count - 1} are in no stage" if stop < count else f"there is no layer {stop - 1}"
        yield Problem(f"{wrong}: {graph.name} has {count} layers, 0-{count - 1}", Mark("layers", last))
        return
    cuts = set(graph.cuts)
    for index, stage in enumerate(plan.stages):
        if index and stage.start not in cuts:
            names = f"{graph.layers[stage.start - 1].name!r} and {graph.layers[stage.start].name!r}"
            nearest = min(cuts, key=lambda cut: (abs(cut - stage.start), cut), default=None)
            hint = f"; the nearest legal cut is before layer {nearest}" if nearest is not None else "; it has no legal cut"
            yield Problem(f"stage {index}: {graph.name} cannot be cut between {names}{hint}", Mark("layers", index))
        yield from parallelism_problems(graph, stage, index)


def parallelism_problems(graph: Graph, stage: Stage, index: int = 0) -> Iterator[Problem]:
    """What a stage divides that its layers do not let it divide; `index` is its number in its plan."""
    layers = graph.layers[stage.start : stage.stop]
    mark = Mark("inside", index)
    if stage.tensor > 1:
        if all(layer.tensor_units == 1 for layer in layers):
            yield Problem(f"stage {index}: tensor={stage.tensor}, but none of its layers can be split", mark)
        for layer in layers:
            if 1 < layer.tensor_units < stage.tensor:
                yield Problem(
                    f"stage {index}: layer {layer.name!r} splits into at most {layer.tensor_units} parts, not {stage.tensor}", mark
                )
                return
    yield from _lanes_can_divide(graph, index, stage)
    if stage.expert:
        experts = [layer.experts for layer in layers if layer.experts]
        if not experts:
            yield Problem(f"stage {index} is expert, but none of its layers has experts", mark)
        elif stage.lanes > min(experts):
            yield Problem(f"stage {index}: {stage.lanes} lanes cannot divide {min(experts)} experts", mark)


def _whole_units(plan: Plan, graph: Graph) -> Iterator[Problem]:
    for index, stage in enumerate(plan.stages):
        yield from share_problems(graph, stage, index)


def share_problems(graph: Graph, stage: Stage, index: int = 0) -> Iterator[Problem]:
    """Replicas whose tensor shares do not deal out whole units of every layer the stage splits; `index` is its number in its plan."""
    if stage.tensor == 1:
        return
    layers = graph.layers[stage.start : stage.stop]
    for shares in dict.fromkeys(replica.tensor_shares for replica in stage.replicas):
        total = sum(shares) or stage.tensor
        wrong = next((layer for layer in layers if layer.tensor_units > 1 and layer.tensor_units % total), None)
        if wrong is not None:
            number = next(number for number, replica in enumerate(stage.replicas) if replica.tensor_shares == shares)
            units = f"the {wrong.tensor_units} units of layer {wrong.name!r}"
            how = f"tensor shares {':'.join(map(str, shares))} do" if shares else f"tensor={stage.tensor} in equal shares does"
            sentence = f"stage {index}, replica {number}: {how} not divide {units} into whole ones; {_shares_that_do(graph, stage)}"
            yield Problem(sentence, Mark("shares", index, number))


def _shares_that_do(graph: Graph, stage: Stage) -> str:
    units = split_units(graph.layers[stage.start : stage.stop])
    found = even_shares(units, stage.tensor)
    if found is None:
        return f"nothing divides {' and '.join(map(str, sorted(set(units))))} alike into {stage.tensor}: cut the stage between such layers"
    example = f"@{':'.join(map(str, found))} does" if found else "equal shares do"
    return f"shares must add up to a divisor of {gcd(*units)}, as {example}"


def _lanes_can_divide(graph: Graph, index: int, stage: Stage) -> Iterator[Problem]:
    for number in stage.split:
        layer = graph.layers[number]
        if layer.tensor_units < stage.lanes:
            most = f"splits into at most {layer.tensor_units} parts" if layer.tensor_units > 1 else "cannot be split"
            yield Problem(f"stage {index}: {stage.lanes} lanes split layer {layer.name!r}, which {most}", Mark("inside", index))
        elif stage.expert and layer.experts:
            sentence = f"stage {index}: lanes divide the experts of layer {layer.name!r}, so they cannot split it too"
            yield Problem(sentence, Mark("inside", index))
