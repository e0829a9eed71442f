"""A plan as a plain table in which one cell can be marked: what a `PlanError` shows under its sentence."""

from atoll.plan.names import shorten
from atoll.plan.plan import Mark, Plan, Replica, Stage
from atoll.plan.text import numbers_text, replica_groups, samples_text

__all__ = ["inside_text", "stage_table"]

_COLUMNS = ("stage", "layers", "inside", "of batch", "replicas", "devices", "samples", "shares")
_MOST_STAGES = 12
_MOST_GROUPS = 6  # rows of one stage; a plan of a thousand unlike replicas still fits on a screen
_MOST_PATTERNS = 4  # device patterns in one cell


def stage_table(plan: Plan, mark: Mark | None = None) -> str:
    """The plan's fields on a line, then a row for each group of alike replicas; the marked cell stands between ▶ and ◀."""
    rows = [list(_COLUMNS)]
    for index, stage in enumerate(plan.stages):
        if index in (shown := _shown(len(plan.stages), mark)):
            rows += _stage_rows(plan, index, stage, mark)
        elif index - 1 in shown:
            rows.append(["…", *[""] * (len(_COLUMNS) - 1)])
    unequal = any(row[-1] for row in rows[1:])
    rows = rows if unequal else [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(f"  {line}" for line in [_fields(plan, mark), *lines])


def _shown(stages: int, mark: Mark | None) -> set[int]:
    """The stages to show: all where they are few, else the first, the last and those around the marked one."""
    if stages <= _MOST_STAGES:
        return set(range(stages))
    middle = mark.stage if mark and mark.stage >= 0 else 0
    return {0, stages - 1, *range(max(0, middle - 3), min(stages, middle + 4))}


def inside_text(stage: Stage) -> str:
    """The parallelism inside a replica in words: `tensor 2 · sharded 4 · split 23 · recompute`."""
    lanes = len(stage.replicas[0].samples) if stage.replicas else 0
    words = [f"tensor {stage.tensor}"] if stage.tensor != 1 else []
    if stage.sharded or stage.expert:
        words += [f"{word} {lanes}" for word, on in (("sharded", stage.sharded), ("expert", stage.expert)) if on]
    elif lanes > 1:
        words.append(f"lanes {lanes}")
    words += [f"split {numbers_text(stage.split)}"] if stage.split else []
    return " · ".join([*words, *(["recompute"] if stage.recompute else [])]) or "–"


def _fields(plan: Plan, mark: Mark | None) -> str:
    fields = {
        "graph": plan.graph,
        "cluster": plan.cluster,
        "mode": plan.mode,
        "schedule": plan.schedule,
        "batch": str(plan.batch_size),
        "micro_batch": str(plan.micro_batch_size),
        **({"staleness": str(plan.staleness)} if plan.staleness != 0 else {}),
        **{f"codec {link}": codec for link, codec in plan.codecs.items()},
        **({"stages": "none"} if not plan.stages else {}),
    }
    wrong = mark.column if mark and mark.stage < 0 else None
    return "  ".join(f"{name} {_marked(value, name == wrong)}" for name, value in fields.items())


def _stage_rows(plan: Plan, index: int, stage: Stage, mark: Mark | None) -> list[list[str]]:
    wrong = mark if mark and mark.stage == index else None
    total = sum(replica.total_samples for replica in stage.replicas)
    head = {
        "stage": str(index),
        "layers": f"{stage.start}-{stage.stop - 1}",
        "inside": inside_text(stage),
        "of batch": f"{total}/{plan.batch_size}",
        "replicas": "none",
    }
    groups = _groups(stage, wrong.replica if wrong else -1)
    rows = [_group_cells(group, wrong if wrong and first <= wrong.replica < first + len(group) else None) for first, group in groups]
    hidden = len(rows) - _MOST_GROUPS
    if hidden > 0:
        rows = [row for row in rows if "▶" in "".join(row.values())] + [row for row in rows if "▶" not in "".join(row.values())]
        rows = [*rows[:_MOST_GROUPS], {"devices": f"… and {hidden} more groups of replicas"}]
    rows = rows or [{}]
    rows[0] = {**head, **rows[0]}
    if wrong and wrong.replica < 0:
        rows[0][wrong.column] = _marked(rows[0].get(wrong.column, ""), True)
    return [[row.get(column, "") for column in _COLUMNS] for row in rows]


def _groups(stage: Stage, alone: int) -> list[tuple[int, tuple[Replica, ...]]]:
    """Groups of alike replicas, each with the index of its first; replica `alone` is a group of its own."""
    parts = [stage.replicas] if alone < 0 else [stage.replicas[:alone], stage.replicas[alone : alone + 1], stage.replicas[alone + 1 :]]
    groups: list[tuple[int, tuple[Replica, ...]]] = []
    first = 0
    for part in parts:
        for group in replica_groups(part):
            groups.append((first, group))
            first += len(group)
    return groups


def _group_cells(group: tuple[Replica, ...], wrong: Mark | None) -> dict[str, str]:
    first = group[0]
    cells = {
        "replicas": f"{len(group)} × {len(first.devices)}",
        "devices": _devices(group, wrong.device if wrong else -1),
        "samples": samples_text(first.samples),
        "shares": ":".join(map(str, first.tensor_shares)),
    }
    if wrong and not (wrong.column == "devices" and wrong.device >= 0):
        cells[wrong.column] = _marked(cells[wrong.column] or "equal", True)
    return cells


def _devices(group: tuple[Replica, ...], wrong: int) -> str:
    names = tuple(device for replica in group for device in replica.devices)
    if wrong < 0:
        return _few(shorten(names))
    before, after = _few(shorten(names[:wrong])), _few(shorten(names[wrong + 1 :]))
    return " ".join(part for part in (before, _marked(names[wrong], True), after) if part)


def _few(patterns: list[str]) -> str:
    if len(patterns) <= _MOST_PATTERNS:
        return " ".join(patterns)
    return f"{' '.join(patterns[: _MOST_PATTERNS - 1])} … {patterns[-1]}"


def _marked(text: str, wrong: bool) -> str:
    return f"▶{text}◀" if wrong else text
