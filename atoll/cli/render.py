"""Plans and their cost as people read them, a hundred columns wide. Names come from files and scripts, so nothing here is markup."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from atoll.cli.output import headed_table, titled
from atoll.cluster import Cluster
from atoll.cluster.cluster import device_index
from atoll.cost import Cost
from atoll.graph import Graph
from atoll.plan import Plan, Replica, Stage
from atoll.plan.names import shorten
from atoll.plan.table import inside_text
from atoll.units import format_bytes, format_count, format_seconds, plural

__all__ = ["StagesTable", "heading", "links_table", "plan_view", "show", "step_view"]

_WIDTH = 100
_MOST_LINKS = 10
_MOST_SITES = 4
_BAR = 40


def show(*views: RenderableType) -> None:
    """Print to stdout: as wide as the terminal; elsewhere as wide as COLUMNS says, or 100, and without the blanks that fill lines up."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(*views, sep="\n")
        return
    console = Console(highlight=False, width=console.width if os.environ.get("COLUMNS", "").isdigit() else _WIDTH)
    with console.capture() as capture:
        console.print(*views, sep="\n")
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def plan_view(plan: Plan, cost: Cost, graph: Graph, cluster: Cluster) -> RenderableType:
    """Everything about one plan but the reasons: what it is for, the table, the step and the links."""
    parts: list[RenderableType] = [heading(plan, graph, cluster), StagesTable(plan, cost, cluster), step_view(cost, graph)]
    if cost.link_bytes:
        parts.append(links_table(plan, cost, cluster))
    return Group(*parts)


def _precision(graph: Graph) -> str:
    return graph.precision if graph.master_weights else f"{graph.precision}-true"


def _frozen(graph: Graph) -> str:
    return f" trained and {format_count(graph.frozen_parameters)} frozen" if graph.frozen_parameters else ""


def heading(plan: Plan, graph: Graph, cluster: Cluster) -> Text:
    """Three lines: the model; the cluster; the mode, the schedule and the batch."""
    used = {device for stage in plan.stages for device in stage.devices}
    everything = len(used) == len(cluster.devices)
    text = Text.assemble(
        (graph.name, "bold"),
        f" · {format_count(graph.parameters)} parameters{_frozen(graph)}, {plural(len(graph.layers), 'layer')}, {_precision(graph)}\n",
        (cluster.name, "bold"),
        f" · {_counted(device.kind.name for device in cluster.devices)} in {plural(len(cluster.sites), 'site')}\n",
        (plan.mode, "bold green"),
        f", {plan.schedule}" if len(plan.stages) > 1 else "",
        f" · batch {plan.batch_size:,} in micro-batches of {plan.micro_batch_size:,}",
        f" · {plural(len(used), 'device')}" if everything else f" · {len(used):,} of {len(cluster.devices):,} devices",
    )
    if plan.staleness:
        text.append(f" · staleness {plan.staleness}")
    return text


def _counted(names: Iterable[str]) -> str:
    parts = [f"{count:,} × {name}" for name, count in Counter(names).most_common()]
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more kinds" if len(parts) > 4 else "")


def step_view(cost: Cost, graph: Graph) -> RenderableType:
    """The predicted step: time, samples and tokens a second, money, and a bar for each part of the time."""
    line = Text.assemble("Step ", (format_seconds(cost.step_seconds), "bold"), " · ", (_rate(cost.samples_per_second, "samples"), "bold"))
    if graph.tokens_per_sample > 1:
        line.append(f" · {_rate(cost.samples_per_second * graph.tokens_per_sample, 'tokens')}")
    if cost.dollars_per_step:
        line.append(f" · ${cost.dollars_per_step:.3g} a step")
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify)
    for name, seconds in sorted(cost.breakdown.items(), key=lambda item: -item[1]):
        share = seconds / cost.step_seconds if cost.step_seconds else 0.0
        bar = Text("█" * round(share * _BAR) or "▏", style="green" if name == "compute" else "yellow")
        table.add_row(Text(name), Text(format_seconds(seconds)), Text(f"{share:.0%}", style="dim"), bar)
    return titled(line, table)


def _rate(value: float, what: str) -> str:
    number = format_count(value) if value >= 100_000 else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{number} {what}/s"


def links_table(plan: Plan, cost: Cost, cluster: Cluster) -> RenderableType:
    """Bytes each link carries in a step, its codec, and how much of the step a link between sites is busy with them."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    rates = {link.name: link.bytes_per_s for link in cluster.links}
    far = sorted(((name, nbytes) for name, nbytes in cost.link_bytes.items() if name in rates), key=lambda item: -item[1] / rates[item[0]])
    for name, nbytes in far[:_MOST_LINKS]:
        busy = f"busy {nbytes / rates[name] / cost.step_seconds:.0%} of the step" if cost.step_seconds else ""
        codec = plan.codecs.get(name, "none")
        table.add_row(Text(name), Text(format_bytes(nbytes)), Text.assemble((busy, "dim"), f"  {codec}" if codec != "none" else ""))
    near = [(f"inside {name}", cost.link_bytes[name]) for name in (site.name for site in cluster.sites) if name in cost.link_bytes]
    rest = [(name, nbytes) for name, nbytes in cost.link_bytes.items() if name not in rates and f"inside {name}" not in dict(near)]
    for name, nbytes in [*_summed(far[_MOST_LINKS:], 0, "more links between sites"), *_summed(near, _MOST_SITES, "sites, inside"), *rest]:
        table.add_row(Text(name), Text(format_bytes(nbytes)), "")
    return titled("Bytes on each link a step", table)


def _summed(links: list[tuple[str, float]], most: int, what: str) -> list[tuple[str, float]]:
    """The links one by one, or their sum when there are more than `most`."""
    return links if len(links) <= most else [(f"{len(links)} {what}", sum(nbytes for _, nbytes in links))]


_MOST_STAGES = 8  # a plan with more shows alike ones as one
_FOLDED = 3  # stages like the one before them are worth folding
_MOST_GROUPS = 8  # rows of one stage
_MOST_PATTERNS = 3  # device patterns in one cell
_INSIDE = 24  # characters of a line that says what is parallel inside
_NARROWEST = 16  # characters of a line that names devices


@dataclass(frozen=True)
class _Row:
    """Cells of one row; the devices' are put together once it is known how much room there is."""

    stage: str = ""
    layers: str = ""
    kinds: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    share: Text = field(default_factory=Text)
    inside: str = ""
    memory: Text = field(default_factory=Text)
    time: str = ""
    ends: bool = False  # a line below sets it apart


class StagesTable:
    """Stage, layers, devices, share of the batch, parallelism inside, memory and time, for rich to print. No name is broken over lines."""

    def __init__(self, plan: Plan, cost: Cost, cluster: Cluster) -> None:
        self._rows = list(_rows(plan, cost, cluster))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        others = Measurement.get(console, options.update_width(10_000), self._table(0)).maximum
        yield self._table(max(_NARROWEST, options.max_width - others + len("devices")))

    def _table(self, room: int) -> Table:
        """The table with so many characters for devices; 0 leaves them out."""
        table = headed_table()
        columns = (("stage", True), ("layers", True), ("devices", False), ("batch share", True), ("inside", False), ("memory", True))
        for name, is_number in (*columns, ("time", True)):
            table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
        for row in self._rows:
            devices = _devices_cell(row, room) if room else Text()
            inside = Text(_lines(row.inside.replace(" · ", " ·\n").split("\n"), _INSIDE), style="cyan")
            table.add_row(Text(row.stage), Text(row.layers), devices, row.share, inside, row.memory, Text(row.time), end_section=row.ends)
        return table


def _rows(plan: Plan, cost: Cost, cluster: Cluster) -> Iterator[_Row]:
    numbered = list(enumerate(plan.stages))
    fold = len(numbered) > _MOST_STAGES
    for _, run in groupby(numbered, lambda item: _likeness(item[1], cluster) if fold else item[0]):
        (index, stage), *rest = run
        alike = rest if len(rest) >= _FOLDED else []
        yield from _stage_rows(plan, cost, cluster, index, stage)
        if alike:
            yield _folded_row(alike, index, cost)
        for number, other in rest[len(alike) :]:
            yield from _stage_rows(plan, cost, cluster, number, other)


def _likeness(stage: Stage, cluster: Cluster) -> object:
    """Equal for stages that differ only in their layers and in which devices of a kind they have."""
    devices = device_index(cluster)
    replicas = tuple(
        (tuple(devices[name].kind.name for name in replica.devices), replica.samples, replica.tensor_shares) for replica in stage.replicas
    )
    return stage.tensor, stage.sharded, stage.expert, stage.recompute, stage.split, replicas


def _folded_row(run: Sequence[tuple[int, Stage]], like: int, cost: Cost) -> _Row:
    """Many stages that are like stage `like`: all their devices, the fullest one's memory, the longest time."""
    (first, start), (last, stop) = run[0], run[-1]
    sizes = sorted({stage.stop - stage.start for _, stage in run})
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    return _Row(
        stage=f"{first}–{last}",
        layers=f"{start.start}–{stop.stop - 1}",
        kinds=tuple(f"each as stage {like}, {each} layer{'s' if sizes[-1] > 1 else ''}".split(" ")),
        names=tuple(name for _, stage in run for name in stage.devices),
        memory=_memory_cell([replica for _, stage in run for replica in stage.replicas], cost),
        time=format_seconds(max(cost.stages[number].busy_seconds for number, _ in run)),
    )


def _stage_rows(plan: Plan, cost: Cost, cluster: Cluster, index: int, stage: Stage) -> Iterator[_Row]:
    groups = _alike(stage, cluster)
    apart = index + 1 < len(plan.stages) and len(groups) > 1
    for number, group in enumerate(groups[:_MOST_GROUPS]):
        first, last = number == 0, number == len(groups) - 1
        yield _Row(
            stage=str(index) if first else "",
            layers=f"{stage.start}–{stage.stop - 1}" if first else "",
            kinds=_kinds(group, cluster),
            names=tuple(name for replica in group for name in replica.devices),
            share=_share_cell(group, plan.batch_size, percent=len(groups) > 1),
            inside=inside_text(stage) if first else "",
            memory=_memory_cell(group, cost),
            time=format_seconds(cost.stages[index].busy_seconds) if first else "",
            ends=apart and last,
        )
    if len(groups) > _MOST_GROUPS:
        rest = [replica for group in groups[_MOST_GROUPS:] for replica in group]
        share = _share_cell(rest, plan.batch_size, percent=True)
        yield _Row(kinds=(f"… {len(rest)} more replicas",), share=share, memory=_memory_cell(rest, cost), ends=apart)


def _alike(stage: Stage, cluster: Cluster) -> list[list[Replica]]:
    """Replicas of the same kinds of device; their shares may differ."""
    devices = device_index(cluster)
    by_kind: dict[tuple[str, ...], list[Replica]] = {}
    for replica in stage.replicas:
        by_kind.setdefault(tuple(devices[name].kind.name for name in replica.devices), []).append(replica)
    return list(by_kind.values())


def _kinds(group: list[Replica], cluster: Cluster) -> tuple[str, ...]:
    """`4 × 8 A100-80GB`, in pieces that may stand on lines of their own."""
    devices = device_index(cluster)
    counts = Counter(devices[name].kind.name for name in group[0].devices)
    single = len(group[0].devices) == 1
    kinds = [kind if single else f"{count} {kind}" for kind, count in counts.items()]
    kinds[1:] = [f"+ {kind}" for kind in kinds[1:]]
    if len(group) > 1 and len(counts) > 1:
        kinds[0], kinds[-1] = f"{len(group)} × ({kinds[0]}", f"{kinds[-1]})"
    elif len(group) > 1:
        kinds[0] = f"{len(group)} × {kinds[0]}"
    return tuple(kinds)


def _devices_cell(row: _Row, room: int) -> Text:
    patterns = shorten(row.names)
    if len(patterns) > _MOST_PATTERNS:
        patterns = [*patterns[: _MOST_PATTERNS - 1], "…", patterns[-1]]
    text = Text(_lines([*row.kinds, *patterns], room), style="dim")
    bold = sum(min(len(kind), room) + 1 for kind in row.kinds) - 1
    text.stylize("not dim bold", 0, max(0, bold))
    return text


def _lines(pieces: Sequence[str], room: int) -> str:
    """The pieces in lines of at most `room` characters, none of them broken; one that is longer by itself loses its middle."""
    lines: list[str] = []
    for piece in pieces:
        short = piece if len(piece) <= room else f"{piece[: room // 2]}…{piece[room // 2 - room + 1 :]}"
        if lines and len(lines[-1]) + 1 + len(short) <= room:
            lines[-1] += f" {short}"
        else:
            lines.append(short)
    return "\n".join(lines)


def _share_cell(group: list[Replica], batch_size: int, *, percent: bool) -> Text:
    totals = [replica.total_samples for replica in group]
    low, high = min(totals), max(totals)
    each = f"{low:,}" if low == high else f"{low:,}–{high:,}"
    times = f"{len(group)} × " if len(group) > 1 else ""
    return Text.assemble(f"{times}{each}", (f" {sum(totals) / batch_size:4.0%}" if percent else "", "dim"))


def _memory_cell(group: list[Replica], cost: Cost) -> Text:
    """The fullest device of the group: used / available."""
    uses = [(cost.memory[name].total_bytes, cost.memory_available[name]) for replica in group for name in replica.devices]
    used, available = max(uses, key=lambda pair: pair[0] / pair[1] if pair[1] else float("inf"))
    style = "bold red" if used > available else "yellow" if used > 0.9 * available else ""
    return Text(f"{_gigabytes(used)}/{format_bytes(available)}", style=style)


def _gigabytes(value: float) -> str:
    if value < 0.01e9:
        return "<0.01"
    return f"{value / 1e9:.3g}" if value < 999.5e9 else format_bytes(value)
