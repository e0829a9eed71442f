"""Plans and their cost as people read them, a hundred columns wide. Names come from files and scripts, so nothing here is markup."""

import os
from collections import Counter
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.cli.stages import StagesTable
from atoll.cluster import Cluster
from atoll.cost import Cost
from atoll.graph import Graph
from atoll.plan import Plan
from atoll.units import format_bytes, format_count, format_seconds, plural

__all__ = ["heading", "links_table", "plan_view", "show", "step_view"]

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
    parts: list[RenderableType] = [heading(plan, graph, cluster), StagesTable(plan, cost, cluster), step_view(cost, graph, plan)]
    if cost.link_bytes:
        parts.append(links_table(plan, cost, cluster))
    return Group(*parts)


def heading(plan: Plan, graph: Graph, cluster: Cluster) -> Text:
    """Three lines: the model; the cluster; the mode, the schedule and the batch."""
    used = {device for stage in plan.stages for device in stage.devices}
    everything = len(used) == len(cluster.devices)
    text = Text.assemble(
        (graph.name, "bold"),
        f" · {format_count(graph.parameters)} parameters, {plural(len(graph.layers), 'layer')}, {graph.precision}\n",
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
