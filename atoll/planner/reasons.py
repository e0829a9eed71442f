"""Reasons: what a plan's bottleneck is and what would relieve it, by asking the cost model "what if"."""

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from atoll.cost import Cost, Evaluator, staleness_effect
from atoll.plan import Plan
from atoll.plan.modes import mode_rules
from atoll.planner.draft import TOO_FEW
from atoll.units import format_bytes, format_rate, format_seconds

__all__ = ["bottleneck", "plan_reasons", "relief", "what_would_help"]

_WORTH_OTHER_NUMBERS = 1.02  # times as fast, for staleness to be mentioned
_PARTS = {
    "compute": "arithmetic and memory traffic of the layers",
    "recompute": "running forward again to save memory",
    "tensor": "all-reduces of tensor parallelism",
    "expert": "exchange of tokens between experts",
    "shard": "gathering sharded parameters",
    "sync": "gradient synchronisation",
    "optimizer": "the optimizer",
    "transfer": "activations and gradients between stages",
    "bubble": "waiting in the pipeline",
    "overhead": "per-step overhead",
    "jitter": "waiting for whoever is slowest at the moment",
    "codec": "encoding and decoding",
}


def bottleneck(plan: Plan, cost: Cost, evaluator: Evaluator) -> str:
    """One sentence on what the step's time goes to and where."""
    part, seconds = max(cost.breakdown.items(), key=lambda item: item[1])
    share = seconds / cost.step_seconds
    busiest = max(range(len(plan.stages)), key=lambda s: cost.stages[s].busy_seconds)
    where = ""
    if part in ("compute", "recompute", "tensor", "expert", "shard"):
        stage = plan.stages[busiest]
        kinds = Counter(evaluator.devices[name].kind.name for name in stage.devices)
        where = f" on stage {busiest} ({', '.join(f'{n}× {kind}' for kind, n in kinds.most_common(3))})"
    elif part in ("sync", "transfer") and cost.link_bytes:
        where = f"; busiest link: {_busiest_link(cost, evaluator)}"
    return (
        f"{_PARTS.get(part, part)} takes {share:.0%} of the step ({format_seconds(seconds)} of {format_seconds(cost.step_seconds)}){where}"
    )


def _busiest_link(cost: Cost, evaluator: Evaluator) -> str:
    wan = {link.name: link for link in evaluator.cluster.links}
    sites = {site.name: site.link for site in evaluator.cluster.sites}
    hosts = {site.name: len(site.hosts) for site in evaluator.cluster.sites}  # each has its own interface

    def seconds(name: str) -> float:
        if name in wan:
            return cost.link_bytes[name] / wan[name].bytes_per_s
        return cost.link_bytes[name] / (sites[name].bytes_per_s * hosts[name]) if name in sites else 0.0

    name = max(cost.link_bytes, key=seconds)
    link = wan.get(name) or sites.get(name)
    rate = f" at {format_rate(link.bytes_per_s)}" if link else ""
    return f"{name}, {format_bytes(cost.link_bytes[name])} a step{rate}"


def relief(plan: Plan, cost: Cost, evaluator: Evaluator) -> tuple[str, ...]:
    """What would help, with how much the cost model says it would."""
    found = []
    rules = mode_rules(plan.mode)
    parts = cost.breakdown
    step = cost.step_seconds
    tight = max(cost.memory, key=lambda name: cost.memory[name].total_bytes / cost.memory_available[name])
    used = cost.memory[tight].total_bytes / cost.memory_available[tight]
    if parts.get("recompute", 0.0) > 0:
        free = replace(plan, stages=tuple(replace(stage, recompute=False) for stage in plan.stages))
        gain = step / evaluator.seconds(free)
        lack = max((u.total_bytes - cost.memory_available[d] for d, u in evaluator.memory(free).items()), default=0.0)
        found.append(f"{format_bytes(max(0.0, lack))} more memory a device would save recomputation: {gain:.2f}× faster")
    if parts.get("bubble", 0.0) > 0.1 * step and len(plan.stages) > 1:
        doubled = step - parts["bubble"] / 2
        found.append(f"twice the batch would halve the part spent waiting: {step / doubled:.2f}× more samples a second")
    for part, what in (("sync", "gradients"), ("transfer", "activations")):
        if parts.get(part, 0.0) > 0.15 * step:
            found.append(f"links twice as wide would take up to {parts[part] / 2 / step:.0%} off the step ({what})")
    if not plan.codecs and parts.get("transfer", 0.0) > 0.15 * step:
        coded = replace(plan, codecs=dict.fromkeys(evaluator.activation_links(plan), "int8"))
        gain = step / evaluator.seconds(coded)
        if gain > _WORTH_OTHER_NUMBERS:
            found.append(f"`--codec auto` would send activations between sites in fewer bytes: this plan is {gain:.2f}× as fast with int8")
    if rules.most_staleness > plan.staleness and parts.get("sync", 0.0) > 0:
        effect = staleness_effect(evaluator, plan)
        if effect.gain > _WORTH_OTHER_NUMBERS:
            found.append(f"`atoll run --staleness 1` would sum gradients during the next step: {effect}")
    if used > 0.9:
        found.append(f"memory is {used:.0%} full on {tight}: a little more would allow larger micro-batches")
    idle = len(evaluator.devices) - len({name for stage in plan.stages for name in stage.devices})
    if parts.get("compute", 0.0) > 0.7 * step and idle:
        found.append(f"the devices used are busy computing: wider links to the {idle} idle ones, or faster ones beside them, would help")
    elif parts.get("compute", 0.0) > 0.7 * step:
        found.append("the devices are busy computing: only more or faster devices help")
    return tuple(found)


def plan_reasons(plan: Plan, cost: Cost, evaluator: Evaluator) -> tuple[str, ...]:
    """Why this plan looks as it does."""
    reasons = []
    kinds = {evaluator.devices[name].kind.name for stage in plan.stages for name in stage.devices}
    unequal = any(len({replica.total_samples for replica in stage.replicas}) > 1 for stage in plan.stages)
    if unequal:
        why = "kinds differ" if len(kinds) > 1 else "the batch does not divide evenly"
        reasons.append(f"shares are unequal because {why}: each in proportion to its speed")
    if len(plan.stages) > 1:
        busy = [stage.busy_seconds for stage in cost.stages]
        even = "each takes about as long as the others" if min(busy) > 0.8 * max(busy) else ""
        reasons.append(f"{len(plan.stages)} stages, cut so that {even or 'the slowest is as fast as memory and legal cuts allow'}")
    if plan.stages[0].tensor > 1:
        reasons.append(f"tensors are split {plan.stages[0].tensor} ways inside hosts, where links are fast")
    if any(stage.sharded for stage in plan.stages):
        whole = replace(plan, stages=tuple(replace(stage, sharded=False) for stage in plan.stages))
        slower = evaluator.seconds(whole) / cost.step_seconds - 1
        why = f"would fit too, for a step {slower:.1%} longer" if evaluator.fits(whole) else "would not fit"
        reasons.append(f"parameters are sharded: a whole copy on every device {why}")
    if mode_rules(plan.mode).whole_stages and any(stage.lanes > 1 for stage in plan.stages):
        said = "devices of a host are one worker, which divides samples among them and sums once"
        reasons.append(f"{said}; a loss that is a mean cannot be divided: let it return (total, weight)")
    split = [layer for stage in plan.stages for layer in stage.split]
    if split:
        share = sum(evaluator.graph.layers[layer].split_parameters for layer in split) / max(1, evaluator.graph.parameters)
        names = ", ".join(evaluator.graph.layers[layer].name for layer in split[:3]) + (f" and {len(split) - 3} more" if split[3:] else "")
        reasons.append(f"lanes divide {names} between them: {share:.0%} of all parameters, whose gradients they need not exchange")
    if any(stage.recompute for stage in plan.stages):
        which = [str(s) for s, stage in enumerate(plan.stages) if stage.recompute]
        who = f"stages {_ranges(which)} recompute: their" if len(which) > 1 else f"stage {which[0]} recomputes: its"
        reasons.append(f"{who} activations would not fit otherwise")
    for codec in sorted(set(plan.codecs.values())):
        links = [link for link, chosen in plan.codecs.items() if chosen == codec]
        said = ", ".join(links[:3]) + (f" and {len(links) - 3} more" if len(links) > 3 else "")
        without = evaluator.seconds(replace(plan, codecs={link: chosen for link, chosen in plan.codecs.items() if chosen != codec}))
        gain = without / evaluator.seconds(plan)
        why = f"without it the step would take {gain:.2f}× as long" if gain > 1.005 else "as asked for; without it steps would be as long"
        reasons.append(f"{codec} on {said}: {why}")
    used = {name for stage in plan.stages for name in stage.devices}
    idle = [device for device in evaluator.cluster.devices if device.name not in used]
    if idle:
        counts = Counter(device.kind.name for device in idle)
        said = ", ".join(f"{n}× {kind}" for kind, n in counts.most_common())
        reasons.append(f"{said} left out: with them the step would not be shorter, by what was tried")
    return tuple(reasons)


def what_would_help(ruled_out: Mapping[str, int]) -> str:
    """Advice where every plan was ruled out, by how many were for which reason."""
    found = []
    if ruled_out.get(TOO_FEW):
        found.append("the batch has fewer samples or micro-batches than there are devices: a larger batch or fewer devices would do")
    if ruled_out.get("out of memory"):
        found.append("more memory in all, an optimizer with less state or a smaller batch would fit")
    if ruled_out.get("more stages than cuts"):
        found.append("fewer stages would do with the places where the model can be cut")
    advice = "; ".join(found) or "another batch size or other devices might do"
    return advice[0].upper() + advice[1:]


def _ranges(numbers: list[str]) -> str:
    consecutive = int(numbers[-1]) - int(numbers[0]) + 1 == len(numbers)
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 2 and consecutive else ", ".join(numbers)
