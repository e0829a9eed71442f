"""From what the parts of a run tell to the events of the run: a step is made when all parts that train have made it. Pure."""

import math
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from atoll.events import AnyEvent, CheckpointFailed, CheckpointSaved, Evaluated, NonFinite, Note, RunFinished, StepFinished, Warned
from atoll.runtime.modes.parts.messages import Missed, PartEvent, PartStep, Use
from atoll.runtime.modes.parts.report import Edge, PartReport, PartsMeasured
from atoll.runtime.part_evaluation import joined_evaluations

__all__ = ["PartTotals", "RunEvents"]


class PartTotals(msgspec.Struct):
    """What a part has done so far."""

    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0


class RunEvents:
    """The run as a whole. `trained` and `evaluated` parts are in the order of the job."""

    def __init__(self, trained: Collection[str], evaluated: Collection[str], batch_size: int, directory: str) -> None:
        self._trained, self._evaluated, self._batch_size, self._directory = tuple(trained), tuple(evaluated), batch_size, directory
        self._steps: dict[int, dict[str, PartStep]] = {}
        self._evaluations: dict[int, dict[str, Evaluated]] = {}
        self._saved: dict[int, dict[str, CheckpointSaved]] = {}
        self.totals = {name: PartTotals() for name in trained}
        self.uses: dict[tuple[str, bool, str], Use] = {}
        self._before: dict[tuple[str, bool, str], Use] = {}  # of processes that have ended
        self.finished: dict[str, RunFinished] = {}
        self.step = 0  # the last that all have made
        self.loss: float | None = None

    def begin(self, step: int) -> None:
        """Those who train begin, or all go on after this step."""
        self._steps, self._evaluations, self._saved, self.finished = {}, {}, {}, {}
        self._before, self.step = dict(self.uses), step

    def add(self, part: str, event: PartEvent) -> list[AnyEvent]:
        """What is to be told of the run now."""
        match event:
            case PartStep():
                return self._add_step(part, event)
            case Evaluated():
                self._evaluations.setdefault(event.step, {})[part] = event
                return self._complete(event.step)
            case CheckpointSaved():
                self._saved.setdefault(event.step, {})[part] = event
                return self._complete(event.step)
            case Use():
                self._add_use(event)
                return []
            case Missed():
                return [self._told_of(part, event)]
            case RunFinished():
                self.finished[part] = event
                return []
            case NonFinite():
                return [event]
            case Note() | Warned():
                return [msgspec.structs.replace(event, source=part)]
            case CheckpointFailed():
                return [msgspec.structs.replace(event, message=f"{part}: {event.message}")]

    def _add_step(self, part: str, event: PartStep) -> list[AnyEvent]:
        totals = self.totals[part]
        totals.steps, totals.seconds = totals.steps + 1, totals.seconds + event.seconds
        totals.waited_seconds += event.waited_seconds
        row = self._steps.setdefault(event.step, {})
        row[part] = event
        if len(row) < len(self._trained):
            return []
        self.step, found = event.step, self._joined(event.step, self._steps.pop(event.step))
        self.loss = found.loss
        return [found, *self._complete(event.step)]

    def _joined(self, step: int, row: Mapping[str, PartStep]) -> StepFinished:
        ordered = [row[name] for name in self._trained]
        losses = {name: one.loss for name, one in zip(self._trained, ordered, strict=True) if one.loss is not None}
        norms = [one.gradient_norm for one in ordered if one.gradient_norm is not None]
        memory = [one.memory_bytes for one in ordered if one.memory_bytes is not None]
        data, loading = (
            [value for one in ordered if (value := getattr(one, name)) is not None] for name in ("data_seconds", "loading_seconds")
        )
        return StepFinished(
            step=step,
            loss=sum(losses.values()),
            samples=self._batch_size,
            weight=ordered[0].weight,
            seconds=max(one.seconds for one in ordered),
            learning_rate=ordered[0].learning_rate,
            gradient_norm=math.hypot(*norms) if norms else None,
            memory_bytes=max(memory, default=None),
            data_seconds=sum(data) / len(data) if data else None,
            loading_seconds=sum(loading) / len(loading) if loading else None,
            losses=losses,
        )

    def _complete(self, step: int) -> list[AnyEvent]:
        """What all parts have told of a step that all have made."""
        found: list[AnyEvent] = []
        if step > self.step:
            return found
        if len(self._evaluations.get(step, ())) == len(self._evaluated) and self._evaluated:
            row = self._evaluations.pop(step)
            found.append(msgspec.structs.replace(joined_evaluations({name: row[name] for name in self._evaluated}), at_seconds=0.0))
        if len(self._saved.get(step, ())) == len(self._trained):
            saved = self._saved.pop(step).values()
            blocked, seconds = max(one.blocked_seconds for one in saved), max(one.seconds for one in saved)
            size = sum(one.size_bytes for one in saved)
            found.append(CheckpointSaved(step=step, path=self._directory, size_bytes=size, blocked_seconds=blocked, seconds=seconds))
        return found

    def _add_use(self, use: Use) -> None:
        key = (use.name, use.gradient, use.receiver)
        before = self._before.get(key)
        if before is not None:
            counted = ("messages", "bytes", "positions", "missed", "waited_seconds", "link_bytes")
            use = msgspec.structs.replace(use, **{name: getattr(before, name) + getattr(use, name) for name in counted})
        self.uses[key] = use

    def _told_of(self, part: str, event: Missed) -> Warned | Note:
        if event.again:
            return Note(message=f"{event.name!r} is there again from step {event.step} on", source=part)
        return Warned(message=f"goes on without {event.name!r} from step {event.step} on: its sender is away", source=part)

    def measured(self, devices: Mapping[str, str]) -> PartsMeasured:
        """What is known of parts and of what crossed, for the report; `devices` by part."""
        edges = [
            Edge(
                name=use.name,
                gradient=use.gradient,
                sender=use.sender,
                receiver=use.receiver,
                steps=use.messages,
                bytes=use.bytes,
                positions=use.positions,
                missed=use.missed,
                waited_seconds=use.waited_seconds,
                link_bytes=use.link_bytes,
            )
            for use in self.uses.values()
        ]
        parts = [
            PartReport(name=name, device=devices[name], steps=one.steps, seconds=one.seconds, waited_seconds=one.waited_seconds)
            for name, one in self.totals.items()
        ]
        return PartsMeasured(edges=tuple(edges), parts=tuple(parts))

    def ending(self) -> Literal["done", "stopped"] | None:
        """How the parts that train have ended; None while one has not."""
        if len(self.finished) < len(self._trained):
            return None
        return "done" if all(one.reason == "done" for one in self.finished.values()) else "stopped"
