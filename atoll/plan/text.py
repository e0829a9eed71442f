"""The text form of a Plan: short enough to read with a thousand devices, and it parses back equal. Files hold it, or JSON.

```
plan v1 graph=gpt2 cluster=two-sites mode=lockstep schedule=1f1b batch=256 micro_batch=8
codec int8: oslo–rome
stage 0: layers 0-11 tensor=2 recompute: 4x(oslo-0/[0-7])=64      # four replicas of two devices, 64 samples each
stage 1: layers 12-23 sharded split=23: rome-[0-1]/[0-3]=8*16 rome-2/[0-7]=4*32@3:1
```

A stage's layers are named first and last. What follows the second colon are its replicas: the devices (a pattern, or several in
parentheses), `=`, and the samples of each lane (`8*16` is eight lanes of 16). `4x(…)` divides the devices evenly over four replicas that
are otherwise alike; `@3:1` gives unequal tensor shares. Names with unusual characters are quoted as in JSON. `#` begins a comment, and an
indented line continues the one before.
"""

import os
import re
import tempfile
from itertools import groupby
from pathlib import Path
from typing import cast, get_args

from atoll.errors import PlanError
from atoll.plan.modes import default_rules, mode_names
from atoll.plan.names import Cursor, quote, ranges_text, shorten
from atoll.plan.plan import CodecName, Plan, Replica, Schedule, Stage

__all__ = ["load_plan", "numbers_text", "parse_plan", "replica_groups", "samples_text", "save_plan", "to_text"]

_WIDTH = 110  # replicas that would make a line longer than this continue on the next
_VERSION = 1
_COUNT = re.compile(r"([0-9]{1,9})x\(")
_FLAGS = ("sharded", "expert", "recompute")
_NUMBERS = ("batch", "micro_batch", "staleness")


def to_text(plan: Plan) -> str:
    """The plan in its text form; `parse_plan` reads it back equal."""
    fields = [
        f"plan v{_VERSION} graph={quote(plan.graph)} cluster={quote(plan.cluster)} mode={plan.mode} schedule={plan.schedule}",
        f"batch={plan.batch_size} micro_batch={plan.micro_batch_size}",
        *([f"staleness={plan.staleness}"] if plan.staleness != 0 else []),
    ]
    lines = [" ".join(fields)]
    links = {codec: tuple(sorted(link for link, name in plan.codecs.items() if name == codec)) for codec in get_args(CodecName)}
    lines += [_wrapped(f"codec {codec}:", shorten(names)) for codec, names in links.items() if names]
    lines += [_stage_text(index, stage) for index, stage in enumerate(plan.stages)]
    return "\n".join(lines) + "\n"


def replica_groups(replicas: tuple[Replica, ...]) -> list[tuple[Replica, ...]]:
    """Neighbouring replicas that differ only in their devices' names, together."""
    return [tuple(group) for _, group in groupby(replicas, lambda r: (len(r.devices), r.samples, r.tensor_shares))]


def samples_text(samples: tuple[int, ...]) -> str:
    """`(16, 16, 8)` → `"2*16,8"`."""
    runs = [(number, len(list(run))) for number, run in groupby(samples)]
    return ",".join(f"{count}*{number}" if count > 1 else str(number) for number, count in runs) or "()"


def numbers_text(numbers: tuple[int, ...]) -> str:
    """`(3, 4, 5, 9)` → `"3-5,9"`."""
    return ranges_text(map(str, numbers))


def _stage_text(index: int, stage: Stage) -> str:
    options = [f"tensor={stage.tensor}"] if stage.tensor != 1 else []
    options += [flag for flag in _FLAGS if getattr(stage, flag)]
    options += [f"split={numbers_text(stage.split)}"] if stage.split else []
    head = " ".join([f"stage {index}: layers {stage.start}-{stage.stop - 1}", *options])
    return _wrapped(f"{head}:", [text for group in replica_groups(stage.replicas) for text in _group_texts(group)])


def _group_texts(group: tuple[Replica, ...]) -> list[str]:
    first = group[0]
    if not first.devices:
        return [f"(){_load_text(first)}" for _ in group]
    patterns = shorten(tuple(device for replica in group for device in replica.devices))
    inner = " ".join(patterns)
    if len(group) > 1:
        return [f"{len(group)}x({inner}){_load_text(first)}"]
    return [(inner if len(patterns) == 1 else f"({inner})") + _load_text(first)]


def _load_text(replica: Replica) -> str:
    shares = "@" + ":".join(map(str, replica.tensor_shares)) if replica.tensor_shares else ""
    return f"={samples_text(replica.samples)}{shares}"


def _wrapped(head: str, parts: list[str]) -> str:
    lines = [head]
    for part in parts:
        if len(lines[-1]) + 1 + len(part) > _WIDTH and lines[-1].strip():
            lines.append("    " + part)
        else:
            lines[-1] += " " + part
    return "\n".join(lines)


def parse_plan(text: str, source: str = "plan") -> Plan:
    """The plan that `to_text` wrote, or that someone wrote by hand; errors name `source`, line and column."""
    cursor = Cursor(text, source)
    numbers, words = _header(cursor)
    codecs: dict[str, CodecName] = {}
    stages: list[Stage] = []
    while not cursor.at_end:
        if cursor.take_choice(("stage", "codec"), "a line that begins with 'stage' or 'codec'") == "stage":
            stages.append(_stage(cursor, len(stages)))
        else:
            _codec(cursor, codecs)
        cursor.skip_lines()
    return Plan(
        graph=words["graph"],
        cluster=words["cluster"],
        mode=words.get("mode", default_rules().name),
        schedule=cast(Schedule, words.get("schedule", "1f1b")),
        batch_size=numbers["batch"],
        micro_batch_size=numbers["micro_batch"],
        staleness=numbers.get("staleness", 0),
        codecs=codecs,
        stages=tuple(stages),
    )


def _header(cursor: Cursor) -> tuple[dict[str, int], dict[str, str]]:
    if cursor.take_choice(("plan",), "a first line that begins with 'plan'") and cursor.peek("v"):
        start = cursor.offset + 1
        cursor.take("v", "before the version")
        if (version := cursor.take_number("the version of the text form")) != _VERSION:
            cursor.fail(f"this is a plan of version {version}; this Atoll reads version {_VERSION}", start)
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}
    while not cursor.at_line_end:
        start = cursor.offset
        key = cursor.take_choice(("graph", "cluster", "mode", "schedule", *_NUMBERS), "a field of the plan")
        if key in numbers or key in words:
            cursor.fail(f"{key} is given twice", start)
        cursor.take("=", f"after {key}")
        if key in _NUMBERS:
            numbers[key] = cursor.take_number(f"a whole number for {key}")
        elif key in ("mode", "schedule"):
            words[key] = cursor.take_choice(mode_names() if key == "mode" else get_args(Schedule), f"a {key}")
        else:
            words[key] = cursor.take_name(f"the name of the {key}")
    for key in ("graph", "cluster", "batch", "micro_batch"):
        if key not in numbers and key not in words:
            cursor.expected(f"{key}=… on the plan's first line")
    cursor.skip_lines()
    return numbers, words


def _codec(cursor: Cursor, codecs: dict[str, CodecName]) -> None:
    codec = cast(CodecName, cursor.take_choice(get_args(CodecName), "a codec"))
    cursor.take(":", "after the codec")
    while not cursor.at_line_end:
        start = cursor.offset
        for link in cursor.take_pattern("the name of a link"):
            if link in codecs:
                cursor.fail(f"link {link!r} has two codecs", start)
            codecs[link] = codec


def _stage(cursor: Cursor, index: int) -> Stage:
    cursor.skip_blanks()
    start = cursor.offset
    if (number := cursor.take_number("the number of the stage")) != index:
        cursor.fail(f"expected stage {index}, found stage {number}; stages are numbered from 0 in order", start)
    cursor.take(":", "after the number of the stage")
    cursor.take_choice(("layers",), "the layers of the stage, such as 'layers 0-11'")
    first = cursor.take_number("the first layer")
    cursor.take("-", "between the first and the last layer")
    last = cursor.take_number("the last layer")
    tensor, split, flags = _stage_options(cursor)
    replicas: list[Replica] = []
    while not cursor.at_line_end:
        replicas += _replicas(cursor)
    on = {flag: flag in flags for flag in _FLAGS}
    return Stage(start=first, stop=last + 1, replicas=tuple(replicas), tensor=tensor, split=split, **on)


def _stage_options(cursor: Cursor) -> tuple[int, tuple[int, ...], set[str]]:
    tensor = 1
    split: tuple[int, ...] = ()
    flags: set[str] = set()
    while not cursor.take_if(":"):
        if cursor.at_line_end:
            cursor.expected("an option of the stage or ':' and its replicas")
        start = cursor.offset
        option = cursor.take_choice(("tensor", "split", *_FLAGS), "an option of the stage or ':'")
        if option in flags:
            cursor.fail(f"{option} is given twice", start)
        flags.add(option)
        if option == "tensor":
            cursor.take("=", "after tensor")
            tensor = cursor.take_number("the number of devices that split each tensor")
        elif option == "split":
            cursor.take("=", "after split")
            split = _numbers(cursor)
    return tensor, split, flags


def _numbers(cursor: Cursor) -> tuple[int, ...]:
    """`3-5,9` → `(3, 4, 5, 9)`."""
    numbers: list[int] = []
    while True:
        start = cursor.offset
        first = last = cursor.take_number("a layer that the lanes divide")
        if cursor.take_if("-"):
            last = cursor.take_number("the last layer of a run")
        if not first <= last <= first + 1_000_000:
            cursor.fail(f"expected layers in ascending order, found {first}-{last}", start)
        numbers += range(first, last + 1)
        if not cursor.take_if(","):
            return tuple(numbers)


def _replicas(cursor: Cursor) -> list[Replica]:
    cursor.skip_blanks()
    start = cursor.offset
    match = cursor.take_match(_COUNT)
    count = int(match[1]) if match else 1
    if match or cursor.take_if("("):
        devices: list[str] = []
        while not cursor.take_if(")"):
            devices += cursor.take_pattern("a device or ')'")
    else:
        devices = list(cursor.take_pattern("a device"))
    if count < 1 or len(devices) % count:
        cursor.fail(f"{len(devices)} devices do not divide evenly over {count} replicas", start)
    cursor.take("=", "and the samples of the replica after its devices")
    samples = _samples(cursor)
    shares = _shares(cursor) if cursor.take_if("@") else ()
    size = len(devices) // count
    return [Replica(devices=tuple(devices[i * size : (i + 1) * size]), samples=samples, tensor_shares=shares) for i in range(count)]


def _samples(cursor: Cursor) -> tuple[int, ...]:
    if cursor.take_if("()"):
        return ()
    samples: list[int] = []
    while True:
        start = cursor.offset
        number = cursor.take_number("a number of samples")
        if cursor.take_if("*"):
            if not 0 < number <= 1_000_000:
                cursor.fail(f"expected a number of lanes before '*', found {number}", start)
            samples += [cursor.take_number("the samples of each lane")] * number
        else:
            samples.append(number)
        if not cursor.take_if(","):
            return tuple(samples)


def _shares(cursor: Cursor) -> tuple[int, ...]:
    shares = [cursor.take_number("a tensor share")]
    while cursor.take_if(":"):
        shares.append(cursor.take_number("a tensor share"))
    return tuple(shares)


def load_plan(path: "str | Path") -> Plan:
    """Read a plan from a JSON or text file; errors name the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot read the plan: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: cannot read the plan: the file is not UTF-8 text") from None
    if text.lstrip().startswith("{"):
        return Plan.from_json(text, str(path))
    if Path(path).suffix == ".toml":
        raise PlanError(f"{path}: is a cluster file, not a plan; give it with --cluster")
    return parse_plan(text, str(path))


def save_plan(plan: Plan, path: "str | Path") -> None:
    """Write a plan, as text when the name ends in `.txt` or `.plan` and as JSON otherwise. The file is whole or untouched."""
    target = Path(path)
    content = to_text(plan) if target.suffix in (".txt", ".plan") else plan.to_json() + "\n"
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(content)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PlanError(f"{path}: cannot write the plan: {(error.strerror or str(error)).lower()}") from None


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
