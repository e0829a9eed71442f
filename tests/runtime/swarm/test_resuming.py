"""A swarm that is stopped politely and resumed trains what one process does, and nothing is lost with those who leave politely."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.control.happenings import Happening, Joined, Left, Repaired, RolledBack, StepCommitted
from atoll.control.journal import Checkpointed, Epoch, Term, decode, encode, replay
from atoll.control.messages import Committed
from atoll.control.settings import Settings
from atoll.errors import JobError, JobFailedError, PlanError
from atoll.events import CoordinatorStarted, RunStarted
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.files import CheckpointFiles, FileJournal, Key
from atoll.runtime.swarm.resuming import Resumed, check_files, check_same_stages, continue_journal, continue_run
from atoll.runtime.swarm.run_files import JOURNAL, STATES, Start, read_spec, read_start, since_start, write_start

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
    def disturb(swarm: OneProcess, happening: Happening) -> None:
        if isinstance(happening, StepCommitted) and happening.version == version:
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
    history = replay(decode(path.read_bytes())[0])
    assert history.checkpoint == Checkpointed(0, history.version)
    assert 2 <= history.version < STEPS

    resumed = asyncio.run(continue_journal(FileJournal(path), CheckpointFiles(tmp_path), SETTINGS))
    assert resumed is not None
    assert (resumed.committed, resumed.checkpoint) == (history.version, history.version)

    second = OneProcess(it, [0, 2, 5], 2, 3, staleness=staleness)
    second.checkpoints = first.checkpoints
    second.journal = FileJournal(path)  # type: ignore[assignment]
    asyncio.run(second.run())
    assert not any(isinstance(happening, RolledBack) for happening in second.happened)  # nothing had to be waited for
    records = decode(path.read_bytes())[0]
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

    def disturb(swarm: OneProcess, happening: Happening) -> None:
        if isinstance(happening, Joined):
            assert swarm.coordinator is not None
            swarm.coordinator.stop()

    asyncio.run(swarm.run(disturb))
    assert not any(isinstance(record, Committed | Checkpointed) for record in swarm.journal.records)


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_leaves_politely_takes_nothing_along(staleness: int) -> None:
    it = job()
    swarm = OneProcess(it, [0, 2, 5], 4, 3, staleness=staleness)

    def disturb(swarm: OneProcess, happening: Happening) -> None:
        if isinstance(happening, StepCommitted) and happening.version == 1:
            swarm.workers["worker-0"].leave()

    asyncio.run(swarm.run(disturb))
    assert [happening.name for happening in swarm.happened if isinstance(happening, Left)] == ["worker-0"]
    assert not any(isinstance(happening, Repaired) for happening in swarm.happened)
    assert swarm.workers["worker-0"].stage == -1
    check(swarm, plain(it, staleness))


def test_a_journal_whose_newest_state_may_be_elsewhere_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert asyncio.run(continue_journal(FileJournal(path), CheckpointFiles(tmp_path), SETTINGS)) is None
    journal = FileJournal(path)
    assert asyncio.run(continue_journal(FileJournal(path), CheckpointFiles(tmp_path), SETTINGS)) is None
    commits = [Committed(0, version, (1, version), ("a",), 1.0, False, 1.0, 1.0) for version in range(3)]

    async def write() -> None:
        for record in (Term(1), Epoch(0, 0, 0), commits[0], commits[1], Checkpointed(0, 2), commits[2]):
            await journal.append(1, record)

    asyncio.run(write())
    before = path.read_bytes()
    resumed = asyncio.run(continue_journal(FileJournal(path), CheckpointFiles(tmp_path), SETTINGS))
    assert resumed is not None
    assert (resumed.committed, resumed.checkpoint) == (3, 2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("checkpoint", [None, Checkpointed(0, 2)])
def test_a_last_step_whose_states_are_nowhere_is_made_again(checkpoint: Checkpointed | None, tmp_path: Path) -> None:
    """Everybody was killed between the last commit and the writing of its states."""
    saved = [checkpoint] if checkpoint is not None else []
    records = [Term(1), Epoch(0, 0, 0), *committed(0, 1), *saved, *committed(*range(2, STEPS))]
    directory = stored(tmp_path, records, Key(0, 2, 0), Key(0, 2, 1), Key(0, STEPS, 0))
    at = checkpoint.version if checkpoint is not None else 0
    assert asyncio.run(continue_run(directory, None, "", SETTINGS)) == Resumed(STEPS, at, lost=True)
    history = replay(decode((tmp_path / JOURNAL).read_bytes())[0])
    assert (history.term, history.version, history.origin) == (2, at, Epoch(1, at, 0))
    stored(tmp_path, records, Key(0, STEPS, 1))  # the other one too: then nothing is to be done again
    assert asyncio.run(continue_run(directory, None, "", SETTINGS)) == Resumed(STEPS, at)


def test_other_stages_are_refused() -> None:
    check_same_stages((0, 2, 5), (0, 2, 5))
    with pytest.raises(PlanError, match=r"begin at layers 0, 2, the plan's stages begin at 0, 3"):
        check_same_stages((0, 2, 5), (0, 3, 5))


def stored(tmp_path: Path, records: list[Any], *keys: Key) -> RunDirectory:
    """A run's directory with a journal and states."""
    (tmp_path / JOURNAL).write_bytes(b"".join(map(encode, records)))
    for key in keys:
        asyncio.run(CheckpointFiles(tmp_path / STATES).write(key, torch.arange(9, dtype=torch.uint8)))
    return RunDirectory(tmp_path)


def committed(*versions: int, epoch: int = 0) -> list[Any]:
    return [Committed(epoch, version, (1, 1), ("",), 1.0, False, 0.0, 1.0) for version in versions]


def test_files_that_fit_together_are_gone_on_with(tmp_path: Path) -> None:
    check_files(RunDirectory(tmp_path), 2)  # nothing was begun
    records = [Term(1), Epoch(0, 0, 0), *committed(0, 1, 2), Checkpointed(0, 2)]
    directory = stored(tmp_path, records, Key(0, 2, 0), Key(0, 2, 1), Key(0, 3, 0))
    check_files(directory, 2)
    back = [*records, Epoch(1, 2, 0)]  # it went back: states of the epoch before are newer
    check_files(stored(tmp_path, back), 2)


def test_a_journal_that_is_gone_cut_or_damaged_is_not_taken_for_a_beginning(tmp_path: Path) -> None:
    records = [Term(1), Epoch(0, 0, 0), *committed(0, 1, 2), Checkpointed(0, 3)]
    for kept in (0, 2, 3):
        directory = stored(tmp_path, records[:kept], Key(0, 3, 0))
        with pytest.raises(JobFailedError, match=r"journal.jsonl: tells of \d steps, but there are states after 3"):
            check_files(directory, 1)
    (tmp_path / JOURNAL).write_bytes(b"rubbish")
    with pytest.raises(JobFailedError, match=r"journal.jsonl: journal: .* restore the file from a copy"):
        check_files(RunDirectory(tmp_path), 1)


def test_a_damaged_or_missing_state_is_told_before_anything_starts(tmp_path: Path) -> None:
    records = [Term(1), Epoch(0, 0, 0), *committed(0, 1, 2), Checkpointed(0, 3)]
    directory = stored(tmp_path, records, Key(0, 3, 0))
    with pytest.raises(JobFailedError, match=r"stage-1\.state: is damaged or missing"):
        check_files(directory, 2)
    file = CheckpointFiles(tmp_path / STATES).path(Key(0, 3, 0))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(JobFailedError, match=r"stage-0\.state: is damaged or missing"):
        check_files(directory, 1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
