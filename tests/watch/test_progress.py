"""What people see of a run."""

import io
import re

import msgspec
import pytest
from rich.console import Console

from atoll.events import (
    AnyEvent,
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    MemberChanged,
    NonFinite,
    ProcessStarted,
    RunFinished,
    RunStarted,
    StepFinished,
    Warned,
)
from atoll.watch.progress import Progress


def events(steps: int, seconds: float) -> list[AnyEvent]:
    started = RunStarted(
        at_seconds=0.0,
        name="tiny",
        mode="alone",
        steps=steps,
        batch_size=8,
        samples=100,
        parameters=1_500_000,
        devices=("cpu",),
        precision="bf16",
        seed=0,
        unix_seconds=0.0,
    )
    finished = [
        StepFinished(
            at_seconds=seconds * step,
            step=step,
            loss=4.0 / step,
            samples=8,
            weight=8.0,
            seconds=seconds,
            learning_rate=0.1,
            memory_bytes=2_000_000_000,
        )
        for step in range(1, steps + 1)
    ]
    last = RunFinished(at_seconds=seconds * steps, reason="done", steps=steps, samples=8 * steps, seconds=seconds * steps, loss=0.5)
    return [started, *finished, last]


def shown(story: list[AnyEvent], *, terminal: bool, goes_on: str = "") -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False, legacy_windows=False)
    with Progress(console, goes_on=goes_on) as progress:
        for event in story:
            progress(event)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_are_few_and_say_everything() -> None:
    lines = shown(events(10, seconds=2.0), terminal=False).splitlines()
    assert lines[0] == "tiny: 1.5 M parameters, 10 steps of 8 samples, bf16 on cpu"
    assert lines[1] == "step 1/10  loss 4.0000  4 samples/s  memory 2 GB"
    assert lines[2] == "step 4/10  loss 1.0000  4 samples/s  memory 2 GB  left 0:12"  # that step's loss
    assert [line.split()[1] for line in lines[1:-1]] == ["1/10", "4/10", "7/10", "10/10"]
    assert lines[-1] == "done: 10 steps in 0:20, loss 4.0000 → 0.5000, 4 samples/s"
    assert "\x1b" not in "".join(lines)


def test_a_terminal_gets_a_line_that_moves_and_a_summary_that_stays() -> None:
    text = shown(events(10, seconds=600.0), terminal=True)
    assert "step 10/10" in text
    assert "\x1b[2K" in text  # the line is redrawn
    assert "left 1:10:00" in text
    assert text.rstrip().endswith("samples/s")
    assert "done: 10 steps in 1:40:00" in text


@pytest.mark.parametrize("width", [66, 80])
def test_in_a_narrow_terminal_the_line_that_moves_is_one_line(width: int) -> None:
    started, *steps, _ = events(30, seconds=0.5)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, legacy_windows=False)
    with Progress(console) as progress:
        for event in [started, *steps]:
            progress(event)
    assert isinstance(console.file, io.StringIO)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    moving = [line for line in re.split(r"[\r\n]", shown) if "loss" in line]
    assert "step 30/30  loss 0.1333  16 samples/s  memory 2 GB  left 0:00" in moving[-1]
    assert ("━" in moving[-1]) == (width == 80)


def test_what_is_out_of_the_ordinary_gets_its_own_line() -> None:
    story = events(2, seconds=1.0)
    story[1:1] = [
        Evaluated(at_seconds=0.5, step=0, loss=5.5, metrics={"accuracy": 0.25, "perplexity": None}, samples=10, seconds=0.1),
        NonFinite(at_seconds=0.6, step=1, what="gradient", value="inf"),
        StepFinished(at_seconds=0.7, step=1, loss=1.0, samples=8, weight=8, seconds=0.1, learning_rate=0.1, applied=False),
    ]
    text = shown(story, terminal=False)
    assert "step 0: evaluation loss 5.5000, accuracy 0.25, perplexity not finite\n" in text
    assert "step 1: the gradient is inf\n" in text
    assert "step 1: fp16 gradients overflowed; step skipped, loss scale lowered\n" in text
    failed = RunFinished(at_seconds=1.0, reason="failed", steps=0, samples=0, seconds=1.0, message="JobError: [bold] is no markup here")
    assert shown([failed], terminal=False) == "failed: 0 steps in 0:01\n"  # the error that is raised says why


def test_no_estimate_rests_on_a_first_step_that_lasted_as_long_as_starting() -> None:
    started, first, *others, last = events(10, seconds=2.0)
    assert isinstance(started, RunStarted)
    assert isinstance(first, StepFinished)
    late = [msgspec.structs.replace(event, at_seconds=event.at_seconds + 60.0) for event in (first, *others, last)]
    late[0] = msgspec.structs.replace(late[0], seconds=62.0)
    for terminal in (False, True):
        text = shown([msgspec.structs.replace(started, mode="swarm"), *late], terminal=terminal)
        assert "step 1/10  loss 4.0000  memory 2 GB" in text  # neither a rate nor a time left
        assert "  4 samples/s  memory 2 GB  left 0:12" in text  # those of the steps after the first


def test_one_is_told_as_one() -> None:
    text = shown(events(1, seconds=2.0), terminal=False)
    assert "1 step of 8 samples" in text
    assert "done: 1 step in 0:02" in text


def test_a_resumed_run_counts_its_own_steps() -> None:
    started, *steps = events(10, seconds=2.0)
    lines = shown([started, *steps[5:]], terminal=False).splitlines()
    assert lines[1].startswith("step 6/10  ")
    assert lines[-1] == "done: 10 steps, 5 of them now, in 0:20, loss 0.6667 → 0.5000, 2 samples/s"
    began = msgspec.structs.replace(started, at_seconds=10.0)  # the run's own time goes on: its rate is that of what was made now
    lines = shown([began, *steps[5:]], terminal=False).splitlines()
    assert lines[-1] == "done: 10 steps, 5 of them now, in 0:20, loss 0.6667 → 0.5000, 4 samples/s"
    assert shown([started, steps[-1]], terminal=False).splitlines()[-1] == "done: all 10 steps had been made before"


def test_a_coordinator_in_anothers_place_tells_of_all_that_was_made_since_the_start() -> None:
    started, *steps, last = events(10, seconds=2.0)
    swarm = msgspec.structs.replace(started, mode="swarm")
    console = Console(file=io.StringIO(), width=120, highlight=False)
    with Progress(console) as progress:
        progress(swarm)
        progress.recall([swarm, *steps[:6]])
        for event in (*steps[6:], last):
            progress(event)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[1].startswith("step 7/10  ")  # what another has shown is not shown again
    assert lines[-1] == shown([swarm, *steps, last], terminal=False).splitlines()[-1]
    assert lines[-1] == "done: 10 steps in 0:20, loss 4.0000 → 0.5000, 4 samples/s"


def test_steps_made_again_after_a_return_to_a_checkpoint_are_no_more_steps() -> None:
    started, *steps, last = events(10, seconds=2.0)
    assert shown([started, *steps[:6], *steps[3:], last], terminal=False).splitlines()[-1].startswith("done: 10 steps in 0:20")
    lines = shown([started, *steps[6:8], *steps[4:], last], terminal=False).splitlines()  # a resumed run that went back further
    assert lines[-1].startswith("done: 10 steps, 6 of them now, in 0:20")
    stopped = msgspec.structs.replace(last, reason="interrupted", steps=5)
    assert shown([started, *steps[6:8], stopped], terminal=False).splitlines()[-1] == "interrupted: all 5 steps had been made before"


def test_the_last_line_says_what_was_saved_and_lost() -> None:
    started, *steps, last = events(10, seconds=2.0)
    saved = CheckpointSaved(at_seconds=9.0, step=4, path="p", size_bytes=10, blocked_seconds=0.0, seconds=0.1)
    lines = shown([started, *steps[:4], saved, *steps[4:6], *steps[4:], last], terminal=False).splitlines()
    assert lines[-1].endswith("; last checkpoint: step 4; 2 steps computed again")
    failed = msgspec.structs.replace(last, reason="failed", steps=6)
    assert (
        shown([started, *steps[:4], saved, *steps[4:6], failed], terminal=False).splitlines()[-1].endswith("step 4; 2 steps after it lost")
    )


def test_how_to_go_on_is_said_where_a_run_was_interrupted_and_saved() -> None:
    started, *steps, last = events(4, seconds=2.0)
    saved = CheckpointSaved(at_seconds=9.0, step=4, path="p", size_bytes=10, blocked_seconds=0.0, seconds=0.1)
    interrupted = msgspec.structs.replace(last, reason="interrupted", steps=4)
    call = "job.run(resume='RUN')"
    assert shown([started, *steps, saved, interrupted], terminal=False, goes_on=call).splitlines()[-1] == f"to go on: {call}"
    for story in ([started, *steps, interrupted], [started, *steps, saved, last]):
        assert "to go on" not in shown(story, terminal=False, goes_on=call)


def test_every_event_that_matters_is_a_line_and_quiet_shows_warnings_only() -> None:
    started, first, *_, last = events(2, seconds=2.0)
    story = [
        started,
        ProcessStarted(name="feeder", role="feeder"),
        MemberChanged(name="anna", state="active", stages=(1,)),
        Warned(message="a long line that no file should have cut in two, " * 4),
        CheckpointFailed(step=1, message="the disk is full"),
        first,
        last,
    ]
    lines = shown(story, terminal=False).splitlines()
    assert lines[1] == "anna joined stage 1"
    assert lines[2].endswith("in two,")
    assert lines[3] == "step 1: the checkpoint could not be saved: the disk is full"
    console = Console(file=io.StringIO(), width=80, highlight=False)
    with Progress(console, quiet=True) as progress:
        for event in story:
            progress(event)
    assert isinstance(console.file, io.StringIO)
    assert [line.split()[0] for line in console.file.getvalue().splitlines()] == ["a", "step", "done:"]
