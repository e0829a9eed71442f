"""The table of stages: no name broken over lines, many alike stages in one row."""

import io
import re

import pytest
from rich.console import Console

from atoll.cli.render import StagesTable
from atoll.cluster import make_cluster, make_site
from atoll.cost import cost
from atoll.graph import dense_transformer
from atoll.plan import Plan, Replica, Stage, validate

LAYERS = 48


def table(plan: Plan, width: int) -> list[str]:
    graph = dense_transformer(name="d", layers=LAYERS - 2, hidden=256, heads=4, sequence=64, vocabulary=512)
    site = make_site("a-site-far-away", kind=[("A100-40GB", 4), ("V100-16GB", 2)], hosts=8)
    cluster = make_cluster("c", [site])
    validate(plan, graph, cluster)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(StagesTable(plan, cost(graph, cluster, plan), cluster))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def pipeline(stages: int, *, uneven: bool = False) -> Plan:
    names = [f"a-site-far-away-{h}/{i}" for h in range(8) for i in (*range(4), *((4, 5) if uneven else ()))]
    edges = [LAYERS * s // stages for s in range(stages + 1)]
    made = [
        Stage(start=a, stop=b, replicas=(Replica(devices=(name,), samples=(8,)),))
        for a, b, name in zip(edges, edges[1:], names, strict=False)
    ]
    return Plan(graph="d", cluster="c", batch_size=8, micro_batch_size=1, stages=tuple(made))


def test_alike_stages_are_one_row() -> None:
    lines = table(pipeline(24), 100)
    rows = [line for line in lines if re.match(r" +\d", line)]
    assert len(rows) == 2
    assert rows[1].split()[:8] == ["1–23", "2–47", "each", "as", "stage", "0,", "2", "layers"]
    assert "a-site-far-away-[1-5]/[0-3]" in "\n".join(lines)


def test_a_stage_on_other_devices_ends_the_row() -> None:
    rows = [line.split()[0] for line in table(pipeline(48, uneven=True), 100) if re.match(r" +\d", line)]
    assert rows[:6] == ["0", "1–3", "4", "5", "6", "7–9"]  # four of one kind, two of another


def test_few_stages_are_all_shown() -> None:
    assert len([line for line in table(pipeline(8), 100) if re.match(r" +\d", line)]) == 8


@pytest.mark.parametrize("width", [70, 80, 100, 160])
@pytest.mark.parametrize("stages", [2, 8, 24])
def test_names_are_whole_and_lines_fit(width: int, stages: int) -> None:
    plan = pipeline(stages)
    lines = table(plan, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    if stages <= 8 and width >= 100:
        for stage in plan.stages:
            assert stage.devices[0] in text


def test_a_name_longer_than_its_column_loses_its_middle() -> None:
    one = Stage(
        start=0, stop=LAYERS, replicas=(Replica(devices=("a-site-far-away-0/0", "a-site-far-away-0/1"), samples=(4, 4)),), sharded=True
    )
    found = [line for line in table(Plan(graph="d", cluster="c", batch_size=8, micro_batch_size=8, stages=(one,)), 78) if "…" in line]
    assert any(re.search(r" a-site-\w*…[\w/-]+\[0-1\]", row) for row in found), found
