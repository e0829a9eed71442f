"""The reasons for a plan, and the plans that came next."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.plan import Plan, diff
from atoll.units import format_seconds

if TYPE_CHECKING:
    from atoll.planner import Planned

__all__ = ["alternatives_table", "why_view"]

_FEW = 3  # sentences of each kind when the user did not ask for all
_SHORT = 56  # characters of a difference in a table


def why_view(planned: "Planned", *, long: bool) -> RenderableType:
    """The bottleneck and what would relieve it, the reasons for the choice, what was considered and what ruled it out."""
    search = "that is all there are, and none is faster" if planned.exact else "not all there are; a faster one may exist"
    considered = f"{planned.considered:,} plans in {format_seconds(planned.seconds)}; {search}"
    rows: list[tuple[str, Sequence[str]]] = [
        ("bottleneck", [planned.bottleneck]),
        ("would help", planned.relief),
        ("because", planned.candidates[0].reasons),
        ("considered", [considered]),
        ("ruled out", planned.ruled_out),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for name, sentences in rows:
        shown = [sentence for sentence in sentences if sentence][: None if long else _FEW]
        for number, sentence in enumerate(shown):
            table.add_row(name if number == 0 else "", Text(sentence))
        if len(sentences) > len(shown) and shown:
            table.add_row("", Text(f"… {len(sentences) - len(shown)} more with --why", style="dim"))
    return Group(Text("Why", style="bold"), Padding(table, (0, 0, 1, 2)))


def alternatives_table(planned: "Planned", *, long: bool) -> RenderableType:
    """The plans after the best: how their steps compare, and in what they differ from it."""
    best = planned.candidates[0]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("against the best", justify="right")
    table.add_column("plan", no_wrap=True)
    table.add_column("differs from the best in", ratio=1)
    for number, candidate in enumerate(planned.candidates[1:], start=2):
        longer = candidate.cost.step_seconds / best.cost.step_seconds - 1 if best.cost.step_seconds else 0.0
        changes = diff(best.plan, candidate.plan).lines()
        shown = changes if long else [_short(change) for change in changes[:2]]
        more = [f"… {len(changes) - len(shown)} more"] if len(changes) > len(shown) else []
        step = format_seconds(candidate.cost.step_seconds)
        table.add_row(str(number), step, f"{longer:+.1%}", _shape(candidate.plan), Text("\n".join([*shown, *more]), style="dim"))
    return Group(Text("Next best", style="bold"), table)


def _short(sentence: str) -> str:
    return sentence if len(sentence) <= _SHORT else f"{sentence[: _SHORT - 1].rstrip()}…"


def _shape(plan: Plan) -> str:
    """`lockstep 4×16`: the mode, and stages × the replicas of each."""
    replicas = sorted({len(stage.replicas) for stage in plan.stages})
    each = str(replicas[0]) if len(replicas) == 1 else f"{replicas[0]}–{replicas[-1]}"
    return f"{plan.mode} {len(plan.stages)} × {each}"
