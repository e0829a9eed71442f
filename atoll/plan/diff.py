"""What differs between two plans, in words."""

from collections.abc import Iterator
from itertools import groupby
from typing import Literal

import msgspec

from atoll.plan.names import shorten
from atoll.plan.plan import Plan, Stage
from atoll.plan.table import inside_text
from atoll.plan.text import samples_text, to_text

__all__ = ["PlanChange", "PlanDiff", "diff"]

_FOLDED = 4  # differences of one kind, in so many stages in a row, make one line
_MOST_CUTS = 8  # stages whose layers are listed

ChangeKind = Literal["plan", "codec", "stages", "layers", "inside", "devices", "samples", "shares"]


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    """One difference: what it is about, which stage of the second plan it is in (-1: the plan as a whole), and a sentence."""

    kind: ChangeKind
    stage: int = -1
    text: str


class PlanDiff(msgspec.Struct, frozen=True, kw_only=True):
    """All differences, the plan's own first, then stage by stage. False when there are none; `str()` is what `lines` says."""

    changes: tuple[PlanChange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "the plans are equal"

    def lines(self) -> tuple[str, ...]:
        """A line for each difference, and one for differences of the same kind in four or more stages in a row."""
        at: dict[int, str] = {}  # by the position of the first change a line speaks of
        for run in _runs(self.changes):
            if len(run) < _FOLDED:
                at.update((position, self.changes[position].text) for position in run)
            else:
                at[run[0]] = _folded([self.changes[position] for position in run])
        return tuple(at[position] for position in sorted(at))

    def to_json(self) -> str:
        """The differences as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


def _runs(changes: tuple[PlanChange, ...]) -> list[list[int]]:
    """Positions of changes that are about the same thing in stages that follow one another."""
    runs: list[list[int]] = []
    latest: dict[tuple[str, bool, bool], list[int]] = {}
    for position, change in enumerate(changes):
        about = (change.kind, " added: " in change.text, " removed: " in change.text)
        run = latest.get(about)
        if run is None or change.stage < 0 or changes[run[-1]].stage + 1 != change.stage:
            runs.append(run := [])
        run.append(position)
        latest[about] = run
    return runs


def _folded(run: list[PlanChange]) -> str:
    first, last = (change.text.removeprefix(f"stage {change.stage}: ") for change in (run[0], run[-1]))
    alike = all(change.text == f"stage {change.stage}: {first}" for change in run)
    return f"stages {run[0].stage}–{run[-1].stage}: {first if alike else f'{first} … {last}'}"


def diff(a: Plan, b: Plan) -> PlanDiff:
    """What became different from plan `a` to plan `b`; empty exactly when they are equal."""
    changes = [*_fields(a, b), *_codecs(a, b), *_stages(a, b)]
    assert bool(changes) == (a != b), f"a difference went unnoticed:\n{to_text(a)}{to_text(b)}"
    return PlanDiff(changes=tuple(changes))


def _fields(a: Plan, b: Plan) -> Iterator[PlanChange]:
    for name in ("graph", "cluster", "mode", "schedule", "batch_size", "micro_batch_size", "staleness"):
        before, after = getattr(a, name), getattr(b, name)
        if before != after:
            words = name.replace("micro_batch", "micro-batch").replace("_", " ")
            yield PlanChange(kind="plan", text=f"{words}: {before} → {after}")


def _codecs(a: Plan, b: Plan) -> Iterator[PlanChange]:
    for link in sorted({*a.codecs, *b.codecs}):
        before, after = a.codecs.get(link, "not named"), b.codecs.get(link, "not named")
        if before != after:
            yield PlanChange(kind="codec", text=f"codec of link {link}: {before} → {after}")


def _stages(a: Plan, b: Plan) -> Iterator[PlanChange]:
    if len(a.stages) != len(b.stages):
        yield PlanChange(kind="stages", text=f"stages: {len(a.stages)} → {len(b.stages)}, now of layers {_cuts(b)} (were {_cuts(a)})")
        yield from _devices("the plan", -1, _all_devices(a), _all_devices(b))
        return
    for index, (before, after) in enumerate(zip(a.stages, b.stages, strict=True)):
        yield from _stage(index, before, after)


def _cuts(plan: Plan) -> str:
    cuts = [f"{stage.start}-{stage.stop - 1}" for stage in plan.stages]
    few = cuts if len(cuts) <= _MOST_CUTS else [*cuts[: _MOST_CUTS - 2], "…", cuts[-1]]
    return " | ".join(few) or "none"


def _all_devices(plan: Plan) -> tuple[str, ...]:
    return tuple(device for stage in plan.stages for device in stage.devices)


def _stage(index: int, before: Stage, after: Stage) -> Iterator[PlanChange]:
    name = f"stage {index}"
    if (before.start, before.stop) != (after.start, after.stop):
        layers = f"layers {before.start}-{before.stop - 1} → {after.start}-{after.stop - 1}"
        growth = (after.stop - after.start) - (before.stop - before.start)
        size = f" ({abs(growth)} {'more' if growth > 0 else 'fewer'})" if growth else ""
        yield PlanChange(kind="layers", stage=index, text=f"{name}: {layers}{size}")
    if _inside(before) != _inside(after):
        yield PlanChange(kind="inside", stage=index, text=f"{name}: inside a replica {inside_text(before)} → {inside_text(after)}")
    yield from _devices(name, index, before.devices, after.devices)
    yield from _grouping(name, index, before, after)


def _inside(stage: Stage) -> tuple[int, bool, bool, bool, tuple[int, ...]]:
    return stage.tensor, stage.sharded, stage.expert, stage.recompute, stage.split


def _devices(name: str, index: int, before: tuple[str, ...], after: tuple[str, ...]) -> Iterator[PlanChange]:
    old, new = set(before), set(after)
    added, removed = tuple(d for d in after if d not in old), tuple(d for d in before if d not in new)
    if added:
        yield PlanChange(kind="devices", stage=index, text=f"{name}: {_counted(added)} added: {' '.join(shorten(added))}")
    if removed:
        yield PlanChange(kind="devices", stage=index, text=f"{name}: {_counted(removed)} removed: {' '.join(shorten(removed))}")


def _counted(devices: tuple[str, ...]) -> str:
    return f"{len(devices)} device{'s' if len(devices) > 1 else ''}"


def _grouping(name: str, index: int, before: Stage, after: Stage) -> Iterator[PlanChange]:
    """Replicas formed otherwise of their devices, and their shares of the batch and of tensors."""
    groups_before, groups_after = ([replica.devices for replica in stage.replicas] for stage in (before, after))
    shape_before, shape_after = (f"{len(groups)} × {len(groups[0]) if groups else 0}" for groups in (groups_before, groups_after))
    if shape_before != shape_after:
        yield PlanChange(kind="devices", stage=index, text=f"{name}: replicas × devices {shape_before} → {shape_after}")
    elif groups_before != groups_after and (set(before.devices) == set(after.devices)):
        yield PlanChange(kind="devices", stage=index, text=f"{name}: the same devices form other replicas")
    old, new = _samples(before), _samples(after)
    if old != new:
        yield PlanChange(kind="samples", stage=index, text=f"{name}: samples {old} → {new}")
    shares_before, shares_after = (tuple(replica.tensor_shares for replica in stage.replicas) for stage in (before, after))
    if shares_before != shares_after and (any(shares_before) or any(shares_after)):
        yield PlanChange(kind="shares", stage=index, text=f"{name}: tensor shares {_shares(shares_before)} → {_shares(shares_after)}")


def _samples(stage: Stage) -> str:
    runs = [(samples_text(samples), len(list(run))) for samples, run in groupby(replica.samples for replica in stage.replicas)]
    return " ".join(f"{count}×({samples})" if count > 1 else samples for samples, count in runs) or "none"


def _shares(shares: tuple[tuple[int, ...], ...]) -> str:
    return " ".join(":".join(map(str, share)) or "equal" for share in dict.fromkeys(shares)) or "none"
