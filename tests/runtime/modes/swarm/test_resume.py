"""A swarm that is stopped politely and resumed trains what one process does, and nothing is lost with those who leave politely."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.control.journal import Checkpointed, Epoch, Term, encode, read_records, replay
from atoll.control.messages import Committed
from atoll.control.settings import Settings
from atoll.errors import JobError, JobFailedError
from atoll.events import AnyEvent, CoordinatorStarted, MemberChanged, RunStarted, StageLost, StepFinished, StepRepaired
from atoll.runtime.checkpoint.manifest import CheckpointManifest, RunIdentity
from atoll.runtime.checkpoint.state_file import WholeCheckpoint
from atoll.runtime.modes.swarm.files import CheckpointFiles, FileJournal, Key
from atoll.runtime.modes.swarm.resume import Resumed, check_journal, continue_journal
from atoll.runtime.modes.swarm.spec import JOURNAL, STATES, Start, read_spec, read_start, since_start, write_start
from atoll.runtime.run_directory import RunDirectory

from .one_process import OneProcess
from .test_compute import STEPS, check, job, plain


@pytest.mark.parametrize(
    ("name", "read"), [("swarm.json", lambda it: read_spec(it.path)), ("started.json", read_start), ("run.json", RunDirectory.settings)]
)
def test_a_file_that_cannot_be_understood_is_a_sentence(name: str, read: Callable[[RunDirectory], object], tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"of": "another version"}')
    with pytest.raises(
        JobError, match=rf"{name}: another version of Atoll wrote it, or it was changed since \(.*; go on with that version"
    ):
        read(RunDirectory(tmp_path))


SETTINGS = Settings(stages=2, micro_batches=1, steps=STEPS)


def stop_after(version: int) -> Any:
    def disturb(swarm: OneProcess, event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == version + 1:
            assert swarm.coordinator is not None
            swarm.coordinator.stop()

    return disturb


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_stopped_swarm_goes_on_from_its_checkpoint(staleness: int, tmp_path: Path) -> None:
    it, path = job(), tmp_path / "journal.jsonl"
    first = OneProcess(it, [0, 2, 5], 3, 3, staleness=staleness)  # no checkpoints but the one of the stop
    first.journal = FileJournal(path)  # type: ignore[assignment]
    asyncio.run(first.run(stop_after(1)))
    assert first.coordinator is not None
    assert first.coordinator.stopped
    history = replay(read_records(path.read_bytes())[0])
    assert history.checkpoint == Checkpointed(0, history.version)
    assert 2 <= history.version < STEPS

    resumed = asyncio.run(continue_journal(FileJournal(path), SETTINGS))
    assert resumed is not None
    assert (resumed.committed, resumed.checkpoint) == (history.version, history.version)

    second = OneProcess(it, [0, 2, 5], 2, 3, staleness=staleness)
    second.checkpoints = first.checkpoints
    second.journal = FileJournal(path)  # type: ignore[assignment]
    asyncio.run(second.run())
    assert not any(isinstance(event, StageLost) for event in second.events)  # nothing had to be waited for
    records = read_records(path.read_bytes())[0]
    assert [record.version for record in records if isinstance(record, Committed)] == list(range(STEPS))  # no step twice
    second.journal.records = list(records)
    check(second, plain(it, staleness))


def test_every_start_has_its_number(tmp_path: Path) -> None:
    """By which those it starts get names that nobody had before."""
    directory = RunDirectory(tmp_path)
    assert [write_start(directory, "h:1").number for _ in range(3)] == [0, 1, 2]


def told_start(at_seconds: float, unix_seconds: float) -> RunStarted:
    return RunStarted(
        at_seconds=at_seconds, name="g", mode="swarm", steps=9, batch_size=8, samples=8, parameters=1, devices=(), precision="fp32", seed=0,
        unix_seconds=unix_seconds,
    )  # fmt: skip


def test_what_was_told_since_a_start_is_known_from_the_events() -> None:
    first, again = CoordinatorStarted(at_seconds=1.0, term=1, step=0), CoordinatorStarted(at_seconds=21.0, term=5, step=3)
    before, now = told_start(0.0, 1000.5), told_start(20.0, 2000.5)
    assert since_start([], Start(0.0, 1000.0, "")) == ()
    assert since_start([before, first], Start(0.0, 1000.0, "")) == [before, first]
    assert since_start([before, first], Start(20.0, 2000.0, "")) == ()  # nobody has told of this start yet
    assert since_start([before, first, now, again], Start(20.0, 2000.0, "")) == [now, again]
    assert since_start([before], Start(0.0, 2000.0, "")) == ()  # of a start before that came to nothing


def test_a_stop_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    swarm = OneProcess(job(), [0, 2, 5], 2, 3)

    def disturb(swarm: OneProcess, event: AnyEvent) -> None:
        if isinstance(event, MemberChanged):
            assert swarm.coordinator is not None
            swarm.coordinator.stop()

    asyncio.run(swarm.run(disturb))
    assert not any(isinstance(record, Committed | Checkpointed) for record in swarm.journal.records)


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_leaves_politely_takes_nothing_along(staleness: int) -> None:
    it = job()
    swarm = OneProcess(it, [0, 2, 5], 4, 3, staleness=staleness)

    def disturb(swarm: OneProcess, event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            swarm.workers["worker-0"].leave()

    asyncio.run(swarm.run(disturb))
    assert [event.name for event in swarm.events if isinstance(event, MemberChanged) and event.state == "left"] == ["worker-0"]
    assert not any(isinstance(event, StepRepaired) for event in swarm.events)
    assert swarm.workers["worker-0"].stage == -1
    check(swarm, plain(it, staleness))


def test_a_journal_whose_newest_state_may_be_elsewhere_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert asyncio.run(continue_journal(FileJournal(path), SETTINGS)) is None
    journal = FileJournal(path)
    assert asyncio.run(continue_journal(FileJournal(path), SETTINGS)) is None
    commits = [Committed(0, version, (1, version), ("a",), 1.0, False, 1.0, 1.0) for version in range(3)]

    async def write() -> None:
        for record in (Term(1), Epoch(0, 0, 0), commits[0], commits[1], Checkpointed(0, 2), commits[2]):
            await journal.append(1, record)

    asyncio.run(write())
    before = path.read_bytes()
    resumed = asyncio.run(continue_journal(FileJournal(path), SETTINGS))
    assert resumed is not None
    assert (resumed.committed, resumed.checkpoint) == (3, 2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("checkpoint", [None, Checkpointed(0, 2)])
def test_a_last_step_whose_states_are_nowhere_is_made_again(checkpoint: Checkpointed | None, tmp_path: Path) -> None:
    """Everybody was killed between the last commit and the writing of its states."""
    saved = [checkpoint] if checkpoint is not None else []
    records = [Term(1), Epoch(0, 0, 0), *committed(0, 1), *saved, *committed(*range(2, STEPS))]
    stored(tmp_path, records, Key(0, 2, 0), Key(0, 2, 1), Key(0, STEPS, 0))
    at = checkpoint.version if checkpoint is not None else 0
    assert asyncio.run(continue_journal(FileJournal(tmp_path / JOURNAL), SETTINGS)) == Resumed(STEPS, at, lost=True)
    history = replay(read_records((tmp_path / JOURNAL).read_bytes())[0])
    assert (history.term, history.version, history.origin) == (2, at, Epoch(1, at, 0))
    stored(tmp_path, [*records, Checkpointed(0, STEPS)], Key(0, STEPS, 1))  # the other one too: then nothing is to be done again
    assert asyncio.run(continue_journal(FileJournal(tmp_path / JOURNAL), SETTINGS)) == Resumed(STEPS, STEPS)


def stored(tmp_path: Path, records: list[Any], *keys: Key) -> RunDirectory:
    """A run's directory with a journal and states."""
    (tmp_path / JOURNAL).write_bytes(b"".join(map(encode, records)))
    for key in keys:
        asyncio.run(CheckpointFiles(tmp_path / STATES).write(key, torch.arange(9, dtype=torch.uint8)))
    return RunDirectory(tmp_path)


def committed(*versions: int, epoch: int = 0) -> list[Any]:
    return [Committed(epoch, version, (1, 1), ("",), 1.0, False, 0.0, 1.0) for version in versions]


def test_a_damaged_journal_is_told_before_anything_starts(tmp_path: Path) -> None:
    check_journal(RunDirectory(tmp_path))  # nothing was begun
    check_journal(stored(tmp_path, [Term(1), Epoch(0, 0, 0), *committed(0, 1, 2), Checkpointed(0, 3)]))
    (tmp_path / JOURNAL).write_bytes(b"rubbish")
    with pytest.raises(JobFailedError, match=r"journal.jsonl: journal: .* restore the file from a copy"):
        check_journal(RunDirectory(tmp_path))


def whole(tmp_path: Path, step: int, mark: dict[str, Any] | None) -> WholeCheckpoint:
    manifest = CheckpointManifest(
        format=2, step=step, run=RunIdentity(job="g", optimizer="SGD", seed=0, batch_size=8), fingerprint="", torch="", atoll="",
        unix_seconds=0.0, ranks=1, sha256={},
    )  # fmt: skip
    return WholeCheckpoint(step, tmp_path, manifest, {}, {} if mark is None else {"swarm": mark}, ())


OWN = {"epoch": 0, "bounds": [0, 2, 5]}


@pytest.mark.parametrize(
    ("step", "mark", "others"),
    [
        (3, OWN, False),
        (3, {"epoch": 0, "bounds": [0, 3, 5]}, True),  # of other stages
        (3, None, True),  # another mode wrote it
        (5, None, True),  # another mode went on
        (2, OWN, True),  # the journal's own is damaged
    ],
)
def test_a_checkpoint_of_other_stages_or_another_mode_begins_a_new_epoch(tmp_path: Path, step: int, mark: Any, others: bool) -> None:
    records = [Term(1), Epoch(0, 0, 0), *committed(0, 1, 2), Checkpointed(0, 3), *committed(3)]
    directory = stored(tmp_path, records, Key(0, 3, 0), Key(0, 3, 1))
    files, found = CheckpointFiles(directory.path / STATES), whole(tmp_path, step, mark)
    resumed = asyncio.run(continue_journal(FileJournal(tmp_path / JOURNAL), SETTINGS, (0, 2, 5), found, files))
    history = replay(read_records((tmp_path / JOURNAL).read_bytes())[0])
    assert resumed is not None
    if others:
        assert (resumed.committed, resumed.checkpoint) == (step, step)
        assert (history.term, history.origin, history.checkpoint) == (2, Epoch(1, step, 0), Checkpointed(0, step))
        assert history.stored
        assert files.path(Key(0, 3, 0)) is None, "states of other stages are never mistaken for these"
    else:
        assert (resumed.committed, resumed.checkpoint, history.term) == (4, 3, 1)


def test_a_swarm_begins_where_another_mode_ended(tmp_path: Path) -> None:
    resumed = asyncio.run(continue_journal(FileJournal(tmp_path / JOURNAL), SETTINGS, (0, 2, 5), whole(tmp_path, 5, None)))
    assert resumed == Resumed(5, 5)
    history = replay(read_records((tmp_path / JOURNAL).read_bytes())[0])
    assert (history.version, history.checkpoint, history.stored) == (5, Checkpointed(0, 5), True)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
