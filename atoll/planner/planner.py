"""`plan(graph, cluster, batch_size=…)`: the best plans, with the reasons.

Small problems are solved exactly; larger ones by a broad search with balanced cuts and local moves, and the result says which it was.
"""

import time
from itertools import islice

import msgspec
from msgspec.structs import replace

from atoll.cluster import Cluster
from atoll.codec import CODECS
from atoll.cost import Calibration, Cost, Evaluator
from atoll.errors import NoPlanError
from atoll.graph import Graph
from atoll.plan import CodecName, Mode, Plan
from atoll.plan.modes import default_rules, installed_modes, mode_rules
from atoll.planner.annotated import annotated_plans
from atoll.planner.arrange import device_classes
from atoll.planner.baselines import best_baselines
from atoll.planner.draft import TOO_FEW
from atoll.planner.exact import Exact, is_small
from atoll.planner.mode import choose_mode
from atoll.planner.reasons import bottleneck, plan_reasons, relief, what_would_help
from atoll.planner.refine import climb
from atoll.planner.rules import Rules, rules_of
from atoll.planner.search import FEW_DEVICES, BroadSearch, Found, Progress, Tally, micro_batch_sizes
from atoll.planner.sites import plan_of_sites
from atoll.planner.timing import SlotTimes
from atoll.units import format_bytes

__all__ = ["Candidate", "Planned", "plan"]

MOST_SAMPLES = 2**20  # of a global batch: more is surely a slip of the pen, and takes long to share out


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, its predicted cost, and why it looks as it does."""

    plan: Plan
    cost: Cost
    reasons: tuple[str, ...]


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner found, best first, and what it did to find it."""

    candidates: tuple[Candidate, ...]
    considered: int  # drafts and plans looked at
    priced: int  # plans priced in full
    ruled_out: tuple[str, ...]
    bottleneck: str
    relief: tuple[str, ...]
    exact: bool  # the best of its whole space, proved
    seconds: float

    @property
    def best(self) -> Plan:
        """The plan to run."""
        return self.candidates[0].plan


def plan(
    graph: Graph,
    cluster: Cluster,
    *,
    batch_size: int,
    top: int = 1,
    mode: Mode | None = None,
    optimizer: str = "adamw",
    calibration: Calibration | None = None,
    codecs: tuple[CodecName, ...] = ("none",),
    max_priced: int | None = None,
    progress: Progress | None = None,
) -> Planned:
    """The `top` best plans for training `graph` on `cluster`; NoPlanError says what came closest where nothing fits.

    `codecs` are those allowed for activations on links between sites; a single one is used on all of them (`allowed_codecs` reads
    `--codec`). `max_priced` bounds the plans priced in full.
    """
    if not 1 <= batch_size <= MOST_SAMPLES:
        raise NoPlanError(f"batch size: must be from 1 to {MOST_SAMPLES:,}, got {batch_size:,}")
    started = time.perf_counter()
    evaluator = Evaluator(graph, cluster, optimizer=optimizer, calibration=calibration)
    if mode is not None and mode_rules(mode).sites_apart:
        return _planned_sites(evaluator, batch_size, mode, started)
    return _Planner(evaluator, batch_size, mode, codecs, max_priced, progress or (lambda what, done, total: None)).run(top, started)


def _planned_sites(evaluator: Evaluator, batch_size: int, mode: Mode, started: float) -> Planned:
    found, cost, reasons, what = plan_of_sites(evaluator, batch_size, mode)
    return Planned(
        candidates=(Candidate(plan=found, cost=cost, reasons=reasons),),
        considered=1,
        priced=1,
        ruled_out=(),
        bottleneck=what,
        relief=(),
        exact=False,
        seconds=time.perf_counter() - started,
    )


class _Search:
    """One search for plans: what is allowed in them, and what became of those looked at."""

    def __init__(
        self, timing: SlotTimes, rules: Rules, batch_size: int, codecs: tuple[CodecName, ...], max_priced: int, progress: Progress
    ) -> None:
        self.evaluator, self.timing, self.rules, self.batch_size = timing.evaluator, timing, rules, batch_size
        self.codecs = {link.name: codecs for link in self.evaluator.cluster.links} if codecs != ("none",) else {}
        self.max_priced, self.progress = max_priced, progress
        self.tally = Tally()

    def run(self, top: int) -> list[Found]:
        """The plans priced, best first, the leaders improved by local moves."""
        found = self._searched(self._codec_sets(), max(top, 5))
        if len(self.evaluator.devices) <= FEW_DEVICES:
            known = found[0].seconds if found else float("inf")
            simple = best_baselines(self.evaluator, self.rules, self.batch_size, known, self.max_priced // 2, self.tally)
            found = sorted([*found, *simple], key=lambda one: one.seconds)
        if self.rules.graph.constraints:
            found = sorted([*found, *self._annotated(max(top, 5))], key=lambda one: one.seconds)
        return self._refined(found)

    def _codec_sets(self) -> list[dict[str, CodecName]]:
        """What links send with in drafts: as it is, and in the fewest bits; where one codec was asked for, that."""
        if self.rules.codecs or not self.codecs:
            return [dict(self.rules.codecs)]
        coding = {link: [name for name in names if name != "none"] for link, names in self.codecs.items()}
        return [{}, {link: min(names, key=lambda name: CODECS[name].bits) for link, names in coding.items()}]

    def _searched(self, codec_sets: list[dict[str, CodecName]], keep: int) -> list[Found]:
        """On all devices of a kind that the mode may use; where they are more than a batch has micro-batches for, on some of them."""
        broad = BroadSearch(self.timing, self.rules, self.batch_size, codec_sets, self.tally, self.progress)
        execution, prices = self.rules.execution, self.max_priced // 2
        found = broad.run(keep, prices, execution.most_devices)
        too_many = not found and execution.whole_micro_batches and self.tally.ruled_out[TOO_FEW]
        return broad.run(keep, prices, self.batch_size) if too_many else found

    def _annotated(self, keep: int) -> list[Found]:
        """The best of the plans in which every stage follows its own annotations."""
        found: list[Found] = []
        sizes = micro_batch_sizes(self.batch_size, self.rules)
        plans = annotated_plans(self.evaluator, self.rules, self.batch_size, sizes)
        for number, plan in enumerate(islice(plans, self.max_priced)):
            self.progress("following annotations", number, self.max_priced)
            if self.evaluator.fits(plan):
                self.tally.priced += 1
                found.append(Found(self.evaluator.seconds(plan), plan))
            else:
                self.tally.ruled_out["out of memory"] += 1
        return sorted(found, key=lambda one: one.seconds)[:keep]

    def _refined(self, found: list[Found]) -> list[Found]:
        leaders = found[: 3 if self.max_priced > 100 else 1]
        improved = []
        for number, each in enumerate(leaders):
            self.progress("refining", number, len(leaders))
            improved.append(climb(each, self.evaluator, self.rules, self.codecs, self.max_priced // 6, self.tally))
        distinct = {one.plan: one for one in [*improved, *found]}
        return sorted(distinct.values(), key=lambda one: one.seconds)

    def exact(self, best: Plan | None, seconds: float) -> tuple[Plan | None, float, bool]:
        """The best plan of the whole space, or the one given, with its seconds; and whether all of the space was covered."""
        exact = Exact(self.evaluator, self.rules, self.batch_size, self.codecs, lambda: exact.priced < 60_000)
        best, seconds = exact.run(best, seconds)
        self.tally.priced += exact.priced
        return best, seconds, exact.complete


class _Planner:
    def __init__(
        self,
        evaluator: Evaluator,
        batch_size: int,
        mode: Mode | None,
        codecs: tuple[CodecName, ...],
        prices: int | None,
        progress: Progress,
    ) -> None:
        self.evaluator, self.batch_size, self.mode, self.codecs, self.progress = evaluator, batch_size, mode, codecs, progress
        cluster = evaluator.cluster
        devices = len(cluster.devices)
        prices = prices or (400 if devices <= 64 else 200 if devices <= 256 else 60)  # fewer of the large plans, which take longer each
        execution = default_rules() if mode is None else mode_rules(mode)
        if (why_not := execution.why_not_graph(evaluator.graph)) is not None:
            raise NoPlanError(why_not)
        others = installed_modes() if mode is None else ()
        self.rules = rules_of(evaluator.graph, devices, execution)
        self.classes = device_classes(cluster)
        if len(codecs) == 1 and codecs != ("none",):
            self.rules = self.rules._replace(codecs=tuple((link.name, codecs[0]) for link in cluster.links))
        self.main = self._search(self.rules, prices)
        self.rivals = [  # plans with which they keep what they are chosen for
            self._search(self.rules._replace(execution=rival, hosts=rival.hosts_per_stage), prices // 2)
            for rival in others
            if rival is not execution and rival.is_candidate(cluster) and rival.why_not_graph(evaluator.graph) is None
        ]

    def _search(self, rules: Rules, prices: int) -> _Search:
        element = 4.0 if self.evaluator.graph.precision == "fp32" else 2.0
        timing = SlotTimes(self.evaluator, self.classes, min(CODECS[name].ratio(element) for name in self.codecs))
        return _Search(timing, rules, self.batch_size, self.codecs, prices, self.progress)

    def run(self, top: int, started: float) -> Planned:
        found = self.main.run(top)
        exact = False
        best_seconds, best = (found[0].seconds, found[0].plan) if found else (float("inf"), None)
        if is_small(len(self.evaluator.devices), len(self.evaluator.graph.layers), self.batch_size):
            best, best_seconds, exact = self.main.exact(best, best_seconds)
            if best is not None and (not found or best_seconds < found[0].seconds):
                found.insert(0, Found(best_seconds, best))
        if not found:
            raise NoPlanError(self._nothing_fits())
        return self._explained(found, top, exact, started)

    def _explained(self, found: list[Found], top: int, exact: bool, started: float) -> Planned:
        evaluator = self.evaluator
        found = self._settled(found, max(top, 3))
        leaders = max(top, 3)
        rivals = [(rival.rules.execution, self._settled(rival.run(leaders), leaders)) for rival in self.rivals]
        choice = choose_mode(found, rivals, evaluator, asked=self.mode is not None)
        plans = [choice.plan, *(one.plan for one in found if one.plan != choice.plan)][:top]
        candidates = []
        for number, each in enumerate(plans):
            each = self._with_useful_codecs(each)
            cost = evaluator.cost(each)
            reasons = plan_reasons(each, cost, evaluator)
            first = (choice.reason, *(f"as annotated: {said}" for said in self.rules.said))
            candidates.append(Candidate(plan=each, cost=cost, reasons=(*first, *reasons) if number == 0 else reasons))
        head, *rest = candidates
        exact = exact and choice.plan == found[0].plan  # one that survives more may be chosen instead
        return Planned(
            candidates=(head, *sorted(rest, key=lambda one: one.cost.step_seconds)),
            considered=sum(tally.considered for tally in self._tallies),
            priced=sum(tally.priced for tally in self._tallies),
            ruled_out=self._ruled_out(found, choice.plan, exact),
            bottleneck=bottleneck(head.plan, head.cost, evaluator),
            relief=relief(head.plan, head.cost, evaluator),
            exact=exact,
            seconds=time.perf_counter() - started,
        )

    def _with_useful_codecs(self, plan: Plan) -> Plan:
        """Without codecs of links that no activation crosses; and unless they were asked for, of links where they save no time."""
        crossed = self.evaluator.activation_links(plan)
        plan = replace(plan, codecs={link: codec for link, codec in plan.codecs.items() if link in crossed})
        while plan.codecs and not self.rules.codecs:
            fewer = [replace(plan, codecs={o: codec for o, codec in plan.codecs.items() if o != link}) for link in plan.codecs]
            best = min(fewer, key=self.evaluator.seconds)
            if self.evaluator.seconds(best) > self.evaluator.seconds(plan):
                break
            plan = best
        return plan

    def _settled(self, found: list[Found], leaders: int) -> list[Found]:
        """The leaders in the order of their full prices: a search extrapolates long steps, which may be off by more than they differ."""
        full = [Found(self.evaluator.cost(one.plan).step_seconds, one.plan) for one in found[:leaders]]
        return [*sorted(full, key=lambda one: one.seconds), *found[leaders:]]

    @property
    def _tallies(self) -> tuple[Tally, ...]:
        return tuple(each.tally for each in (self.main, *self.rivals))

    def _ruled_out(self, found: list[Found], chosen: Plan, exact: bool) -> tuple[str, ...]:
        """What became of all plans considered but the one chosen: the numbers at the lines' beginnings add up to them."""
        is_fastest = chosen == found[0].plan
        why_not = "priced, and not faster" if is_fastest else f"priced, and not chosen ({chosen.mode}: see above)"
        if is_fastest and len(found) > 1:
            why_not += f"; the next best takes {found[1].seconds / found[0].seconds - 1:.1%} longer"
        lines = list(self.main.tally.lines(chosen.mode == self.rules.execution.name, why_not))
        for rival in self.rivals:
            name = rival.rules.execution.name
            lines += [f"{line} ({name})" for line in rival.tally.lines(chosen.mode == name, "priced, and not chosen")]
        return (*lines, *(("every other plan of the exact search's space: none is faster",) if exact else ()))

    def _nothing_fits(self) -> str:
        evaluator = self.evaluator
        where, limits = (f" in mode {self.mode}", self.rules.execution.limits) if self.mode is not None else ("", "")
        need = evaluator.graph.parameters * (8 + evaluator.optimizer.state_bytes) + evaluator.amounts.frozen[-1]
        have = sum(device.memory_bytes for device in evaluator.cluster.devices)
        ruled_out = self.main.tally.ruled_out
        said = f"; annotations ask for {', '.join(self.rules.said)}" if self.rules.said else ""
        if self.rules.said and not ruled_out["out of memory"]:
            return (
                f"no plan{where} for {evaluator.graph.name} with a batch of {self.batch_size} on the {len(evaluator.devices)} devices of "
                f"{evaluator.cluster.name} honours all annotations: {', '.join(self.rules.said)}. {limits}Parts that ask for "
                "different numbers of devices need devices of their own; leave a number free, annotate less, or plan for more devices"
            )
        problem = f"no plan fits {evaluator.graph.name} with a batch of {self.batch_size} on {evaluator.cluster.name}{where}"
        memory = f"{format_bytes(need)} and all devices together have {format_bytes(have)}"
        needed = f" Parameters, gradients and optimizer state alone need {memory}." if ruled_out["out of memory"] else ""
        return f"{problem}: {self.main.tally.reasons()}{said}.{needed} {limits}{what_would_help(ruled_out)}"
