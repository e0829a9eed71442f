"""Plan: which layers run where, with which share of the batch and which parallelism inside. A noun: frozen, JSON round trip.

How to read one. A global batch of `batch_size` samples is cut into micro-batches of `micro_batch_size`. The model is a row of `stages`; a
stage has `replicas`, each a group of devices that together hold one copy of the stage's parameters. Every micro-batch visits one replica
of each stage; a replica's `samples` say how much of the global batch it takes, so whole micro-batches are routed to replicas in that
proportion. (With one stage there is nothing to route: any share is possible, and a replica works through it in micro-batches of at most
`micro_batch_size`.)

Inside a replica the devices form a grid of `lanes × tensor`. The devices of one lane split tensors between them (`tensor_shares` when
unequally; `plan/division.py` says who holds what). Lanes divide each micro-batch; `samples` has one entry a lane. Lanes either repeat the
stage's parameters or shard them (`sharded`, as FSDP does), and with `expert` they divide the experts and exchange tokens. So a replica has
`lanes × tensor` devices, listed lane by lane.

The layers that `split` names are the exception among lanes: their tensors are divided between the lanes, as tensor parallelism would
divide them, while every other layer of the stage stays data parallel. (A classifier of 100,000 classes behind a small backbone: replica
and split on the same devices.) Before such a layer's divided part the lanes gather each other's samples, each computes its part of
the output for all of them, and partial results return to the lanes that own the samples; backward goes the other way. Those tensors,
their gradients and their optimizer state exist once a replica and are not synchronised between lanes.

Two stages may name the same devices: that is how interleaved schedules (virtual stages) are written.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from atoll.errors import PlanError

__all__ = ["CodecName", "Mark", "Mode", "Plan", "Problem", "Replica", "Schedule", "Stage", "check_word", "decode_strictly"]

Mode = str  # the name of one of `plan.modes`; whoever reads a plan or validates it checks it
Schedule = Literal["gpipe", "1f1b", "interleaved"]
CodecName = Literal["none", "bf16", "fp16", "int8", "int4"]

_FORMAT = 1  # of the JSON form; written first, so that a later Atoll knows what it reads


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that together hold one copy of a stage, and their share of the global batch."""

    devices: tuple[str, ...]  # lane by lane
    samples: tuple[int, ...]  # of the global batch, one entry a lane
    tensor_shares: tuple[int, ...] = ()  # relative shard sizes along a lane, in whole units of every split layer; () means equal

    @property
    def total_samples(self) -> int:
        """The replica's part of the global batch."""
        return sum(self.samples)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Layers `start` to `stop` (exclusive) and the replicas that run them."""

    start: int
    stop: int
    replicas: tuple[Replica, ...]
    tensor: int = 1  # devices that split each tensor
    sharded: bool = False  # lanes shard parameters, gradients and optimizer state (FSDP)
    expert: bool = False  # lanes divide the experts
    recompute: bool = False  # forward is run again in backward, all but the model's last layer
    split: tuple[int, ...] = ()  # layers, ascending, whose tensors the lanes divide between them instead of repeating or sharding them

    @property
    def lanes(self) -> int:
        """Devices of a replica that work on different samples."""
        return len(self.replicas[0].devices) // self.tensor

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices of the stage, replica by replica."""
        return tuple(device for replica in self.replicas for device in replica.devices)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a runtime needs to know; see the module's text for how to read it."""

    graph: str  # name of the graph it was made for
    cluster: str
    batch_size: int
    micro_batch_size: int
    stages: tuple[Stage, ...]
    mode: Mode = "lockstep"
    schedule: Schedule = "1f1b"
    codecs: dict[str, CodecName] = msgspec.field(default_factory=dict)  # by link name; a link not named sends tensors as they are
    staleness: int = 0  # steps a reduction may lag, in modes that can

    def __hash__(self) -> int:
        return hash((self.batch_size, self.micro_batch_size, self.stages, self.mode, self.schedule, tuple(sorted(self.codecs.items()))))

    def __str__(self) -> str:
        from atoll.plan.text import to_text  # it builds Plans, so it comes after this file

        return to_text(self)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches make a global batch (the last may be smaller)."""
        return -(-self.batch_size // self.micro_batch_size)

    def to_json(self) -> str:
        """This plan as JSON; `from_json` reads it back equal."""
        return msgspec.json.format(msgspec.json.encode({"format": _FORMAT, **msgspec.structs.asdict(self)}), indent=1).decode()

    @staticmethod
    def from_json(text: "str | bytes", source: str = "plan") -> "Plan":
        """The plan that `to_json` wrote; a `PlanError` begins with `source` and gives the path to the field that is wrong."""
        from atoll.plan.modes import mode_names  # modes speak of Plans, so they come after this file

        plan = decode_strictly(text, Plan, what=source, version=_FORMAT)
        check_word(plan.mode, mode_names(), what=source, path="mode")
        return plan


@dataclass(frozen=True)
class Mark:
    """Which cell is wrong: a column of a stage (and of one replica, and one device in it), or a field of the plan when `stage` is -1."""

    column: str
    stage: int = -1
    replica: int = -1
    device: int = -1  # position among the replica's devices


class Problem(NamedTuple):
    """One broken rule: a sentence, and the cell of the table it speaks of."""

    sentence: str
    mark: Mark


T = TypeVar("T", bound=msgspec.Struct)

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def decode_strictly(text: "str | bytes", kind: type[T], *, what: str, version: int) -> T:
    """Decode `text` as `kind`. `what` begins every message; the optional key `format` must equal `version`."""
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise PlanError(f"{what}: this is not JSON: {error}") from None
    if isinstance(raw, dict):
        raw.pop("sha256", None)  # of a plan in a run's directory, which whoever continues the run checks
        found = raw.pop("format", version)
        if found != version:
            raise PlanError(f"{what}: format: this Atoll reads format {version}, got {found!r}")
    _refuse_unknown(raw, kind, what, "")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise PlanError(f"{what}: {_in_words(str(error))}") from None


def _refuse_unknown(raw: Any, kind: Any, what: str, path: str) -> None:
    """Walk the decoded JSON beside its type; wrong kinds of value are left to `msgspec.convert`."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(raw, dict):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        for key, value in raw.items():
            here = f"{path}.{key}" if path else key
            if key not in fields:
                raise PlanError(f"{what}: {here}: there is no such field; {_hint(key, list(fields))}")
            _refuse_unknown(value, fields[key], what, here)
    elif get_origin(kind) is tuple and isinstance(raw, list):
        for index, value in enumerate(raw):
            _refuse_unknown(value, get_args(kind)[0], what, f"{path}[{index}]")
    elif get_origin(kind) is dict and isinstance(raw, dict):
        for key, value in raw.items():
            _refuse_unknown(value, get_args(kind)[1], what, f"{path}.{key}")
    elif get_origin(kind) is Literal and isinstance(raw, str):
        check_word(raw, get_args(kind), what=what, path=path)


def check_word(word: str, known: Sequence[str], *, what: str, path: str) -> None:
    """PlanError where the word in a field is none of those it may be."""
    if word not in known:
        raise PlanError(f"{what}: {path}: {word!r} is not one of its values; {_hint(word, list(known))}")


def _hint(wrong: str, right: list[str]) -> str:
    nearest = difflib.get_close_matches(wrong, right, 1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(right)}"


def _in_words(message: str) -> str:
    """`Expected `int`, got `str` - at `$.stages[0].start`` → `stages[0].start: expected a whole number, got a string`."""
    problem, _, place = message.partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        return f"{path + '.' if path else ''}{missing[1]}: this field is missing"
    problem = re.sub(r"`(\w+)`", lambda match: _WORDS.get(match[1], match[0]), problem)
    return f"{path or 'the whole'}: {problem[:1].lower()}{problem[1:]}"
