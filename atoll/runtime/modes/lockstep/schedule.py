"""Schedule: what every worker does in a step, action by action, as a small language that prints and parses.

| action | means |
|---|---|
| `2F0` | stage 2 computes the forward of micro-batch 0 |
| `2B0` | stage 2 computes its backward |
| `2RF0` | stage 2 posts the receive of its input for micro-batch 0, from stage 1 |
| `2SF0` | stage 2 sends its output for micro-batch 0 to stage 3 |
| `2RB0` | stage 2 posts the receive of the gradient of its output, from stage 3 |
| `2SB0` | stage 2 sends the gradient of its input to stage 1 |
| `2G` | the replicas of stage 2 synchronise its gradients |
| `O` | the optimizer's step |

A worker is a replica's whole group of devices, all of which do the same actions in the same order; with virtual stages it has several
stages. Workers, stages and micro-batches count from 0. Who is at the other end of a send or a receive follows from `Workers`, so an action
does not say it. Where two neighbouring stages of a micro-batch are on one worker, nothing is sent.

What the actions promise: a receive is posted where it stands and waited for by the forward or backward that needs it; a send goes on by
itself. Between two workers, activations arrive in the order they were sent, and so do gradients.
"""

import re
from functools import cached_property
from typing import Literal, get_args

import msgspec

from atoll.errors import ScheduleError

__all__ = ["Action", "Kind", "Schedule", "Workers"]

Kind = Literal["F", "B", "RF", "SF", "RB", "SB", "G", "O"]

_NUMBER = r"0|[1-9]\d{0,8}"
_ACTION = re.compile(rf"({_NUMBER})(F|B|RF|SF|RB|SB)({_NUMBER})|({_NUMBER})(G)|(O)")
_LINE = re.compile(rf"\s*({_NUMBER})\s*:(.*)")


class Action(msgspec.Struct, frozen=True, order=True):
    """One thing a worker does; `str(action)` is its word in the language."""

    kind: Kind
    stage: int = -1  # -1: of no one stage (`O`)
    micro_batch: int = -1  # -1: of all micro-batches (`G`, `O`)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}" if self.micro_batch >= 0 else f"{self.stage}G" if self.kind == "G" else "O"

    @property
    def computes(self) -> bool:
        """Whether it is a forward or a backward."""
        return self.kind in ("F", "B")

    @property
    def receives(self) -> bool:
        """Whether it posts a receive."""
        return self.kind in ("RF", "RB")

    @property
    def sends(self) -> bool:
        """Whether it sends."""
        return self.kind in ("SF", "SB")

    @property
    def sent_as(self) -> "Action":
        """For a receive, the send on the other end."""
        return Action("SF", self.stage - 1, self.micro_batch) if self.kind == "RF" else Action("SB", self.stage + 1, self.micro_batch)

    @property
    def received_as(self) -> "Action":
        """For a send, the receive on the other end."""
        return Action("RF", self.stage + 1, self.micro_batch) if self.kind == "SF" else Action("RB", self.stage - 1, self.micro_batch)

    @staticmethod
    def parse(text: str) -> "Action":
        """The action that `str` prints as `text`."""
        match = _ACTION.fullmatch(text)
        if match is None:
            kinds = ", ".join(f"2{kind}0" for kind in get_args(Kind)[:-2])
            raise ScheduleError(f"cannot read {text!r} as an action; there are {kinds} (stage 2, micro-batch 0), 2G and O")
        if match[6]:
            return Action("O")
        if match[5]:
            return Action("G", int(match[4]))
        kind: Kind = match[2]  # type: ignore[assignment]
        return Action(kind, int(match[1]), int(match[3]))


class Workers(msgspec.Struct, frozen=True, dict=True):
    """Who has which stage, and who takes which micro-batch: all of a plan that a schedule depends on."""

    homes: tuple[tuple[int, ...], ...]  # worker of each replica, by stage
    route: tuple[tuple[int, ...], ...]  # replica that takes each micro-batch, by stage

    def __post_init__(self) -> None:
        if not self.homes or len(self.homes) != len(self.route):
            raise ScheduleError(f"workers: {len(self.homes)} stages have homes, but {len(self.route)} have a route")
        for stage, (homes, route) in enumerate(zip(self.homes, self.route, strict=True)):
            if len(route) != len(self.route[0]):
                raise ScheduleError(f"workers: stage 0 routes {len(self.route[0])} micro-batches, but stage {stage} {len(route)}")
            if len(set(homes)) != len(homes):
                raise ScheduleError(f"workers: stage {stage} has two replicas on one worker")
            if any(not 0 <= replica < len(homes) for replica in route):
                raise ScheduleError(f"workers: stage {stage} has {len(homes)} replicas, but routes a micro-batch to another")
        named = sorted({worker for homes in self.homes for worker in homes})
        if named != list(range(len(named))):
            raise ScheduleError(f"workers: they must be numbered from 0 without gaps, got {', '.join(map(str, named))}")

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.homes)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has."""
        return len(self.route[0])

    @cached_property
    def count(self) -> int:
        """How many workers there are."""
        return 1 + max(worker for homes in self.homes for worker in homes)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each worker, ascending."""
        return tuple(tuple(s for s, homes in enumerate(self.homes) if worker in homes) for worker in range(self.count))

    def home(self, stage: int, micro_batch: int) -> int:
        """The worker that computes a micro-batch's stage."""
        return self.homes[stage][self.route[stage][micro_batch]]

    def crosses(self, stage: int, micro_batch: int) -> bool:
        """Whether a micro-batch goes to another worker between `stage` and the next; `False` after the last and before the first."""
        return 0 <= stage < self.stages - 1 and self.home(stage, micro_batch) != self.home(stage + 1, micro_batch)

    def peer(self, action: Action) -> int:
        """The worker on the other end of a send or a receive."""
        assert action.sends or action.receives, f"{action} has no other end"
        other = action.sent_as if action.receives else action.received_as
        return self.home(other.stage, other.micro_batch)


class Schedule(msgspec.Struct, frozen=True):
    """The actions of one step, worker by worker. `str` prints one line a worker, `Schedule.parse` reads it back equal."""

    actions: tuple[tuple[Action, ...], ...]  # by worker

    def __getitem__(self, worker: int) -> tuple[Action, ...]:
        return self.actions[worker]

    def __len__(self) -> int:
        return len(self.actions)

    def __str__(self) -> str:
        return "\n".join(f"{worker}: {_words(row)}".rstrip() for worker, row in enumerate(self.actions))

    @staticmethod
    def parse(text: str, source: str = "schedule") -> "Schedule":
        """The schedule that `str` prints as `text`. `#` begins a comment; errors begin with `source` and the line."""
        rows: list[tuple[Action, ...]] = []
        for number, line in enumerate(text.splitlines(), 1):
            content = line.partition("#")[0]
            if not content.strip():
                continue
            match = _LINE.fullmatch(content)
            if match is None or int(match[1]) != len(rows):
                raise ScheduleError(
                    f"{source}: line {number}: expected the line of worker {len(rows)}, such as '{len(rows)}: 0F0 0B0 0G O'"
                )
            rows.append(_parsed(match[2], f"{source}: line {number}"))
        return Schedule(tuple(rows))


def _words(row: tuple[Action, ...]) -> str:
    return " ".join(map(str, row))


def _parsed(words: str, where: str) -> tuple[Action, ...]:
    try:
        return tuple(Action.parse(word) for word in words.split())
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None
