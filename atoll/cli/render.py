"""Plans and their cost as people read them, a hundred columns wide. Names come from files and scripts, so nothing here is markup."""

from collections import Counter
from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.cluster import Cluster
from atoll.cluster.cluster import device_index
from atoll.cost import Cost
from atoll.graph import Graph
from atoll.plan import Plan, Replica, Stage
from atoll.plan.names import shorten
from atoll.plan.table import inside_text
from atoll.units import format_bytes, format_count, format_seconds

__all__ = ["heading", "links_table", "plan_table", "plan_view", "show", "step_view"]

_WIDTH = 100
_MOST_GROUPS = 8  # rows of one stage
_MOST_PATTERNS = 3  # device patterns in one cell
_MOST_LINKS = 10
_MOST_SITES = 4
_BAR = 40


def show(*views: RenderableType) -> None:
    """Print to stdout: as wide as the terminal; elsewhere in 100 columns and without the blanks that fill lines up."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(*views, sep="\n")
        return
    console = Console(highlight=False, width=_WIDTH)
    with console.capture() as capture:
        console.print(*views, sep="\n")
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def plan_view(plan: Plan, cost: Cost, graph: Graph, cluster: Cluster) -> RenderableType:
    """Everything about one plan but the reasons: what it is for, the table, the step and the links."""
    parts: list[RenderableType] = [heading(plan, graph, cluster), plan_table(plan, cost, cluster), step_view(cost, graph, plan)]
    if cost.link_bytes:
        parts.append(links_table(plan, cost, cluster))
    return Group(*parts)


def heading(plan: Plan, graph: Graph, cluster: Cluster) -> Text:
    """Three lines: the model; the cluster; the mode, the schedule and the batch."""
    used = {device for stage in plan.stages for device in stage.devices}
    everything = len(used) == len(cluster.devices)
    text = Text.assemble(
        (graph.name, "bold"),
        f" · {format_count(graph.parameters)} parameters, {len(graph.layers)} layers, {graph.precision}\n",
        (cluster.name, "bold"),
        f" · {_counted(device.kind.name for device in cluster.devices)} in {_plural(len(cluster.sites), 'site')}\n",
        (plan.mode, "bold green"),
        f", {plan.schedule}" if len(plan.stages) > 1 else "",
        f" · batch {plan.batch_size:,} in micro-batches of {plan.micro_batch_size:,}",
        f" · {_plural(len(used), 'device')}" if everything else f" · {len(used):,} of {len(cluster.devices):,} devices",
    )
    if plan.mode == "islands":
        text.append(f" · islands exchange every {plan.outer_steps} steps")
    if plan.staleness:
        text.append(f" · staleness {plan.staleness}")
    return text


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _counted(names: Iterable[str]) -> str:
    parts = [f"{count:,} × {name}" for name, count in Counter(names).most_common()]
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more kinds" if len(parts) > 4 else "")


def plan_table(plan: Plan, cost: Cost, cluster: Cluster) -> Table:
    """A row for each group of alike replicas: stage, layers, devices, share of the batch, parallelism inside, memory, time."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("stage", "layers"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("devices", overflow="fold")
    table.add_column("batch share", justify="right", no_wrap=True)
    table.add_column("inside", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for index, stage in enumerate(plan.stages):
        _add_stage(table, plan, cost, cluster, index, stage)
    return table


def _add_stage(table: Table, plan: Plan, cost: Cost, cluster: Cluster, index: int, stage: Stage) -> None:
    groups = _alike(stage, cluster)
    shown = groups[:_MOST_GROUPS]
    last_of_stage = index + 1 < len(plan.stages) and len(groups) > 1
    for number, group in enumerate(shown):
        first = number == 0
        table.add_row(
            Text(str(index) if first else ""),
            Text(f"{stage.start}–{stage.stop - 1}" if first else ""),
            _devices_cell(group, cluster),
            _share_cell(group, plan.batch_size, percent=len(groups) > 1),
            Text(inside_text(stage) if first else "", style="cyan"),
            _memory_cell(group, cost),
            Text(format_seconds(cost.stages[index].busy_seconds) if first else ""),
            end_section=last_of_stage and number == len(shown) - 1 and len(groups) <= _MOST_GROUPS,
        )
    if len(groups) > _MOST_GROUPS:
        rest = [replica for group in groups[_MOST_GROUPS:] for replica in group]
        cell = Text(f"… {len(rest)} more replicas", style="dim")
        table.add_row(
            "", "", cell, _share_cell(rest, plan.batch_size, percent=True), "", _memory_cell(rest, cost), "", end_section=last_of_stage
        )


def _alike(stage: Stage, cluster: Cluster) -> list[list[Replica]]:
    """Replicas of the same kinds of device; their shares may differ."""
    devices = device_index(cluster)
    by_kind: dict[tuple[str, ...], list[Replica]] = {}
    for replica in stage.replicas:
        by_kind.setdefault(tuple(devices[name].kind.name for name in replica.devices), []).append(replica)
    return list(by_kind.values())


def _devices_cell(group: list[Replica], cluster: Cluster) -> Text:
    devices = device_index(cluster)
    names = tuple(name for replica in group for name in replica.devices)
    size = len(group[0].devices)
    counts = Counter(devices[name].kind.name for name in group[0].devices)
    kinds = " + ".join(kind if size == 1 else f"{count} {kind}" for kind, count in counts.items())
    if len(group) > 1:
        kinds = f"{len(group)} × ({kinds})" if len(counts) > 1 else f"{len(group)} × {kinds}"
    patterns = shorten(names)
    where = " ".join(patterns) if len(patterns) <= _MOST_PATTERNS else f"{' '.join(patterns[: _MOST_PATTERNS - 1])} … {patterns[-1]}"
    return Text.assemble((kinds, "bold"), " ", (where, "dim"))


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
    return f"{value / 1e9:.3g}" if value < 999.5e9 else format_bytes(value)


def step_view(cost: Cost, graph: Graph, plan: Plan) -> RenderableType:
    """The predicted step: time, samples and tokens a second, money, and a bar for each part of the time."""
    line = Text.assemble("Step ", (format_seconds(cost.step_seconds), "bold"), " · ", (_rate(cost.samples_per_second, "samples"), "bold"))
    if graph.tokens_per_sample > 1:
        line.append(f" · {_rate(cost.samples_per_second * graph.tokens_per_sample, 'tokens')}")
    if cost.dollars_per_step:
        line.append(f" · ${cost.dollars_per_step:.3g} a step")
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for name, seconds in sorted(cost.breakdown.items(), key=lambda item: -item[1]):
        share = seconds / cost.step_seconds if cost.step_seconds else 0.0
        bar = Text("█" * round(share * _BAR) or "▏", style="green" if name == "compute" else "yellow")
        table.add_row(Text(name), Text(format_seconds(seconds)), Text(f"{share:.0%}", style="dim"), bar)
    return Group(line, Padding(table, (0, 0, 1, 2)))


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
    return Group(Text("Bytes on each link a step", style="bold"), Padding(table, (0, 0, 1, 2)))


def _summed(links: list[tuple[str, float]], most: int, what: str) -> list[tuple[str, float]]:
    """The links one by one, or their sum when there are more than `most`."""
    return links if len(links) <= most else [(f"{len(links)} {what}", sum(nbytes for _, nbytes in links))]
