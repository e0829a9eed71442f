"""Launching: real processes that die, freeze, raise, are interrupted and are started anew. Every moment is scripted, none is timed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from atoll.errors import AtollError
from atoll.events import AnyEvent, EventStream, MemberChanged, ProcessEnded, ProcessStarted, Restarted, WorkerFailed
from atoll.runtime.modes.lockstep.supervisor import LaunchResult, launch
from atoll.watch.describe import describe_event, importance
from tests.gone import wait_until_gone

pytestmark = pytest.mark.timeout(120)

SCRIPT = str(Path(__file__).with_name("scripted_rank.py"))
DEVICES = ["oslo/cpu0", "oslo/cpu1", "oslo/cpu2"]


def show(event: AnyEvent) -> None:
    if importance(event) == "warning":
        print(f"atoll: {describe_event(event)}", file=sys.stderr, flush=True)


def command_of(process: psutil.Process) -> str:
    """Empty for one that has ended, whether or not anybody has asked how."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or, a kind of it, a zombie
        return ""


def run(*actions: str, culprit: int = 2, ranks: int = 3) -> tuple[LaunchResult, list[AnyEvent]]:
    """Generation g does `actions[g]`."""
    events: list[AnyEvent] = []
    result = launch(
        lambda rank, generation: [sys.executable, SCRIPT, str(culprit), actions[generation]],
        ranks,
        observer=EventStream(show, events.append, seconds=time.monotonic),
        devices=DEVICES[:ranks],
        max_restarts=len(actions) - 1,
        stall_seconds=1.0 if "block" in actions else 3600.0,
    )
    assert not [child for child in psutil.Process().children(recursive=True) if "scripted_rank" in command_of(child)]
    return result, events


def test_ranks_of_a_run_too_short_for_a_heartbeat_were_active_before_they_left() -> None:
    _, events = run("train", culprit=9)  # nobody waits at step 3
    for rank in range(3):
        states = [event.state for event in events if isinstance(event, MemberChanged) and event.name == f"rank {rank}"]
        assert states[-2:] == ["active", "left"]
        assert states.count("active") == states.count("left") == 1


def test_a_killed_rank_is_named_and_everybody_starts_anew(capfd: pytest.CaptureFixture[str]) -> None:
    result, events = run("die", "train")
    sentence = (
        "rank 2 (oslo/cpu2, stage 1) died at step 3 while running backward of micro-batch 3 (signal 9); every rank stops; "
        "the last checkpoint is step 2"
    )
    assert result == LaunchResult(exit_code=0, restarts=1)
    (failed,) = [event for event in events if isinstance(event, WorkerFailed)]
    (restarted,) = [event for event in events if isinstance(event, Restarted)]
    processes = [(event.name, event.restarts) for event in events if isinstance(event, ProcessStarted)]
    assert processes == [(f"rank {rank}", start) for start in range(2) for rank in range(3)]
    ended = [(event.name, event.how, event.then) for event in events if isinstance(event, ProcessEnded)]
    assert ("rank 2", "signal 9", "stop") in ended
    assert sorted(ended[-3:]) == [(f"rank {rank}", "exit code 0", "done") for rank in range(3)]
    (dead,) = [event for event in events if isinstance(event, MemberChanged) and event.state == "dead"]
    assert (dead.name, dead.device, dead.reason) == ("rank 2", "oslo/cpu2", "signal 9")
    assert (failed.rank, failed.device, failed.stage, failed.step, failed.doing, failed.message) == (
        2,
        "oslo/cpu2",
        "stage 1",
        3,
        "1B3",
        sentence,
    )
    assert (restarted.generation, restarted.reason) == (1, sentence)
    printed = capfd.readouterr()
    assert printed.err.splitlines() == [f"atoll: {sentence}", "atoll: restarting all ranks (restart 1 of at most 1)"]
    assert sorted(printed.out.splitlines()) == [
        "[1 oslo/cpu1] rank 1 trained 6 steps",
        "[2 oslo/cpu2] rank 2 trained 6 steps",
        "rank 0 trained 6 steps",
    ]


def test_a_frozen_rank_is_named_after_the_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    result, _ = run("freeze", culprit=0, ranks=2)
    assert result.failure is not None
    assert (result.exit_code, result.failure.rank, result.failure.kind, result.failure.doing) == (1, 0, "silent", "1B3")
    assert "rank 0 (oslo/cpu0, stage 1) fell silent at step 3 while running backward of micro-batch 3" in capfd.readouterr().err


def test_code_that_hangs_is_named_while_the_others_wait_and_when_they_give_up(capfd: pytest.CaptureFixture[str]) -> None:
    result, _ = run("block", culprit=1, ranks=2)
    assert result.failure is not None
    assert (result.failure.rank, result.failure.kind, result.exit_code) == (1, "blocked", 1)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("atoll: ")]
    while_waiting, at_the_end = [line for line in told if "reading sample 12" in line]
    assert while_waiting.startswith("atoll: rank 1 (oslo/cpu1, stage 1) has been reading sample 12 of the data for ")
    assert while_waiting.endswith(" s at step 3; the others wait for it")
    assert at_the_end.startswith(
        "atoll: rank 1 (oslo/cpu1, stage 1) kept the others waiting at step 3 while reading sample 12 of the data (for "
    )
    assert "until rank 0 gave up: " in at_the_end


def test_an_error_in_one_rank_is_told_once_with_the_users_own_line(capfd: pytest.CaptureFixture[str]) -> None:
    result, events = run("raise", culprit=1, ranks=2)
    assert result.failure is not None
    assert (result.failure.rank, result.failure.kind) == (1, "raised")
    assert sum(isinstance(event, WorkerFailed) for event in events) == 1
    printed = capfd.readouterr().err.splitlines()
    told = [line for line in printed if line.startswith("atoll: ")]
    assert len(told) == 1
    assert "ArithmeticError: the loss went wrong (scripted_rank.py:" in told[0]
    assert 'in users_loss: raise ArithmeticError("the loss went wrong"))' in told[0]
    assert all(line.startswith(("atoll: ", "[1 oslo/cpu1] ")) for line in printed)  # the victims say nothing of lost connections


def test_ctrl_c_lets_the_step_end_and_the_same_on_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    result, events = run("interrupt", culprit=0, ranks=2)
    assert result == LaunchResult(exit_code=0, interrupted=True)
    assert not [event for event in events if importance(event) == "warning"]
    stopped = [line.partition("stops after step ")[2] for line in capfd.readouterr().out.splitlines()]
    assert len(stopped) == 2
    assert stopped[0] == stopped[1]


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
child.wait()
"""


def test_a_second_ctrl_c_kills_and_nothing_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    # Signals that come too fast are one signal, so it goes on asking: only the kill ends it.
    impatient = STUBBORN.replace("child.wait()", "while child.poll() is None: os.kill(os.getppid(), signal.SIGINT); time.sleep(0.05)")
    result = launch(lambda rank, generation: [sys.executable, "-c", impatient], 1, observer=show, terminal_for_rank_0=False)
    assert result == LaunchResult(exit_code=130, interrupted=True)
    _, *pids = capfd.readouterr().out.removeprefix("[0] ").split()
    wait_until_gone([int(pid) for pid in pids])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_launcher_leaves_no_rank_behind() -> None:
    launcher = (
        "import sys; from atoll.runtime.modes.lockstep.supervisor import launch\n"
        f"launch(lambda rank, generation: [sys.executable, '-c', {STUBBORN.replace('child.wait()', 'signal.pause()')!r}], 2)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told: list[str] = []
    while len(told) < 2:
        line = process.stdout.readline()
        assert line, "the launcher has ended"
        told += line.split("pids ")[1:]
    ranks = [int(text.split()[0]) for text in told]
    children = [child.pid for rank in ranks for child in psutil.Process(rank).children()]
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until_gone(ranks)
    for child in children:  # a rank's own children end by themselves in training; here they only sleep
        os.kill(child, signal.SIGKILL)


def test_output_comes_line_by_line_with_its_rank(capfd: pytest.CaptureFixture[str]) -> None:
    shows = (
        "import os, sys; print('threads', os.environ['OMP_NUM_THREADS']); sys.stderr.write('half a line')\n"
        "sys.exit(3 * (os.environ['RANK'] == '1'))"
    )
    result = launch(
        lambda rank, generation: [sys.executable, "-c", shows],
        2,
        observer=show,
        devices=DEVICES[:2],
        environ={"OMP_NUM_THREADS": "7"},
        terminal_for_rank_0=False,
    )
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == ["[0 oslo/cpu0] threads 7", "[1 oslo/cpu1] threads 7"]
    assert "[0 oslo/cpu0] half a line" in printed.err.splitlines()
    assert (
        "atoll: rank 1 (oslo/cpu1) died while starting (exit code 3); every rank stops; there is no checkpoint" in printed.err.splitlines()
    )
    assert (result.exit_code, result.restarts) == (3, 0)


def test_the_newest_checkpoint_is_asked_for_when_a_rank_fails() -> None:
    result = launch(
        lambda rank, generation: [sys.executable, "-c", "import sys; sys.exit(3)"],
        1,
        observer=show,
        terminal_for_rank_0=False,
        newest_checkpoint=lambda: 40,
    )
    assert result.failure is not None
    assert result.failure.sentence.endswith("the last checkpoint is step 40")


def test_what_cannot_be_started_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    result = launch(lambda rank, generation: ["no-such-program"], 1, observer=show, terminal_for_rank_0=False)
    assert result.exit_code == 1
    assert "cannot start no-such-program: No such file or directory" in capfd.readouterr().err
    with pytest.raises(AtollError, match="at least one rank"):
        launch(lambda rank, generation: [], 0, observer=show)
    with pytest.raises(AtollError, match="1 devices named for 2 ranks"):
        launch(lambda rank, generation: [], 2, observer=show, devices=["oslo/cpu0"])
