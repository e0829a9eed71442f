"""Events survive their file, a crash and other writers included; every kind has a line in words and a row in docs/events.md.

`python -m tests.test_events` writes that document anew.
"""

import ast
import errno
import multiprocessing
import os
import re
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import atoll.events
from atoll.errors import AtollError
from atoll.events import (
    AnyEvent,
    CheckpointFailed,
    Evaluated,
    Event,
    EventLog,
    EventStream,
    LinkUse,
    NonFinite,
    Note,
    RunFinished,
    RunStarted,
    StepFinished,
    UnknownEvent,
    Wait,
    Warned,
    read_events,
)
from atoll.watch.describe import describe_event, importance

KINDS: tuple[type[Event], ...] = get_args(AnyEvent)
DOCUMENT = Path(atoll.events.__file__).parent.parent / "docs" / "events.md"

EVENTS: list[AnyEvent] = [
    RunStarted(
        at_seconds=0.0,
        name="job",
        mode="alone",
        steps=2,
        batch_size=4,
        samples=8,
        parameters=10,
        devices=("cpu",),
        precision="fp32",
        seed=0,
        unix_seconds=1.5,
    ),
    StepFinished(at_seconds=1.0, step=1, loss=2.5, samples=4, weight=4.0, seconds=0.5, learning_rate=0.1, gradient_norm=3.0),
    Evaluated(at_seconds=1.5, step=1, loss=2.0, metrics={"accuracy": 0.5}, samples=8, seconds=0.1),
    NonFinite(at_seconds=2.0, step=2, what="loss", value="nan"),
    RunFinished(at_seconds=2.0, reason="failed", steps=1, samples=4, seconds=2.0, loss=2.5, message="the loss is nan"),
]


def struct(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any value of a struct, from the types of its fields."""
    return st.builds(kind, **{field.name: st.from_type(field.type) for field in msgspec.structs.fields(kind)})


st.register_type_strategy(float, st.floats(min_value=0, max_value=1e9, allow_nan=False))
st.register_type_strategy(int, st.integers(min_value=0, max_value=2**40))
for inner in (Wait, LinkUse):
    st.register_type_strategy(inner, struct(inner))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_survives_json_and_has_a_line_in_words(kind: type[Event]) -> None:
    @given(struct(kind))
    def check(event: AnyEvent) -> None:
        assert msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent) == event
        line = describe_event(event)
        assert line
        assert line == " ".join(line.split())  # one line
        assert importance(event) in ("detail", "notice", "warning")

    check()


def test_every_event_is_in_the_union_and_public() -> None:
    defined = {
        name for name, value in vars(atoll.events).items() if isinstance(value, type) and issubclass(value, Event) and value != Event
    }
    assert defined == {kind.__name__ for kind in KINDS}
    assert defined <= set(atoll.events.__all__)


def write(directory: Path) -> Path:
    with EventLog(directory) as log:
        for event in EVENTS:
            log(event)
    return log.path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    assert list(read_events(write(tmp_path / "run"))) == EVENTS


def test_events_are_frozen_and_know_their_kind() -> None:
    assert EVENTS[1].kind == "step_finished"
    assert b'"event":"non_finite"' in msgspec.json.encode(EVENTS[3])
    with pytest.raises(AttributeError):
        EVENTS[1].step = 3  # type: ignore[misc]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_events(path)) == EVENTS[:-1]
    for again in (lambda: EventLog(tmp_path, resume=True), lambda: EventLog.join(tmp_path)):
        with again() as log:  # and taken off before another is appended
            log(EVENTS[-1])
        assert list(read_events(path)) == EVENTS
        path.write_bytes(path.read_bytes()[:-5])


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":"one"', 1))
    with pytest.raises(AtollError, match=r"events\.jsonl:3: not an event: Expected `int`, got `str`"):
        list(read_events(path))
    path.write_bytes(b'{"at_seconds":1.0}\n')
    with pytest.raises(AtollError, match=r"events\.jsonl:1: not an event"):
        list(read_events(path))


def test_what_a_newer_version_wrote_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"event":"telepathy","at_seconds":3.0,"who":["a"]}\n')
    unknown = UnknownEvent(at_seconds=3.0, name="telepathy")
    assert list(read_events(path)) == [*EVENTS, unknown]
    assert unknown.kind == "telepathy"
    newer = path.read_bytes().replace(b'"format":2', b'"format":3').replace(b'"what":"loss"', b'"what":"mood"')
    path.write_bytes(newer.replace(b'"step":1', b'"colour":"red","step":1'))
    assert [event.kind for event in read_events(path)] == [event.kind for event in [*EVENTS, unknown]]


def test_a_log_without_a_header_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes().partition(b"\n")[2])
    assert list(read_events(path)) == EVENTS


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(AtollError, match="holds another run already"):
        EventLog(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(AtollError, match="cannot write the run there"):
        EventLog(tmp_path / "file" / "run")
    with pytest.raises(AtollError, match="cannot read it"):
        list(read_events(tmp_path / "nowhere"))


def test_the_time_of_a_resumed_run_goes_on_and_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    write(tmp_path)  # until 2 s
    now = 5000.0
    with EventLog(tmp_path, resume=True) as log, EventLog.join(tmp_path) as other:
        now = 5003.0
        assert (log.seconds(), other.seconds()) == (5.0, 5.0)
        log(Note(at_seconds=log.seconds(), message="one"))
        other(Note(at_seconds=1.0, message="late"))
        now = 4000.0  # the clock was set back
        log(Note(at_seconds=log.seconds(), message="two"))
    assert [event.at_seconds for event in read_events(tmp_path / "events.jsonl")][-3:] == [5.0, 5.0, 5.0]


def _append(directory: Path, name: str, count: int) -> None:
    with EventLog.join(directory) as log:
        for number in range(count):
            log(Note(at_seconds=log.seconds(), message=f"{name} {number} " + "x" * 500, source=name))


def test_lines_of_several_processes_are_whole_and_in_the_order_of_their_times(tmp_path: Path) -> None:
    EventLog(tmp_path).close()
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(tmp_path, name, 200)) for name in ("a", "b", "c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = list(read_events(tmp_path / "events.jsonl"))
    moments = [event.at_seconds for event in events]
    assert moments == sorted(moments)
    for name in ("a", "b", "c"):
        own = [event.message.split()[1] for event in events if isinstance(event, Note) and event.source == name]
        assert own == [str(number) for number in range(200)]


def test_a_stream_stamps_what_is_emitted_and_never_goes_back() -> None:
    moments, seen = iter([1.0, 3.0, 2.0]), list[AnyEvent]()
    stream = EventStream(seen.append, seen.append, seconds=lambda: next(moments))
    for message in "abc":
        stream(Note(message=message))
    assert [event.at_seconds for event in seen] == [1.0, 1.0, 3.0, 3.0, 3.0, 3.0]


# ---- the document


def sections() -> str:
    """Every kind with its fields and their comments, as the source has them, under the source's own headings."""
    source = Path(atoll.events.__file__).read_text(encoding="utf-8")
    lines, found = source.splitlines(), []
    headings = {number: line.removeprefix("# ---- ") for number, line in enumerate(lines, 1) if line.startswith("# ---- ")}
    names = {kind.__name__ for kind in KINDS} | {"Wait", "LinkUse", "SiteRound"}
    for node in ast.parse(source).body:
        while headings and min(headings) < node.lineno:
            found.append(f"## {headings.pop(min(headings)).capitalize()}\n")
        if isinstance(node, ast.ClassDef) and node.name in names:
            kind = getattr(atoll.events, node.name)
            title = f"`{kind.__struct_config__.tag}`" if issubclass(kind, Event) else f"{node.name} (part of an event)"
            rows = [f"- `{_source(lines, field)}`{_comment(lines, field)}" for field in node.body if isinstance(field, ast.AnnAssign)]
            found.append(f"### {title}\n{_wrapped(ast.get_docstring(node) or '')}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(section for section in found if not section.startswith("## Where events go"))


def _source(lines: list[str], field: ast.AnnAssign) -> str:
    return lines[field.lineno - 1][field.col_offset : field.end_col_offset]


def _comment(lines: list[str], field: ast.AnnAssign) -> str:
    comment = lines[field.lineno - 1][field.end_col_offset :].strip().removeprefix("# ")
    for line in lines[field.lineno :]:
        if not line.strip().startswith("# ") or line.startswith("#"):
            break
        comment += f" {line.strip().removeprefix('# ')}"
    return f" — {comment}" if comment else ""


def _wrapped(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_the_document_lists_every_kind_with_its_fields() -> None:
    assert DOCUMENT.read_text(encoding="utf-8").partition("<!-- kinds -->\n")[2] == sections()


if __name__ == "__main__":
    DOCUMENT.write_text(DOCUMENT.read_text(encoding="utf-8").partition("<!-- kinds -->\n")[0] + "<!-- kinds -->\n" + sections(), "utf-8")


def test_a_full_disk_ends_no_run_and_is_told_when_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = os.write, [False]

    def write(file: int, data: bytes) -> int:
        if full[0]:
            real(file, data[:5])  # as much as there was room for
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    with EventLog(tmp_path) as log:
        for step in range(1, 6):
            full[0] = step in (2, 3)
            log(CheckpointFailed(at_seconds=float(step), step=step, message=""))
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [event.step for event in events if isinstance(event, CheckpointFailed)] == [1, 4, 5]
    (told,) = [event for event in events if isinstance(event, Warned)]
    assert told.message == "2 events before this are not in the log: it could not be written (No space left on device)"
