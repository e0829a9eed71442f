"""Failures: who is silent, what is said of it, and how ranks end under launchers that are not Atoll's."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from atoll.runtime.modes.lockstep.failure import VICTIM_EXIT_CODE, Failure, Freshness, Watcher, condemn, prepare
from atoll.runtime.modes.lockstep.heartbeat import Heartbeat, read_heartbeats
from atoll.runtime.modes.lockstep.role import Role
from tests.warm import run_warm

SCRIPT = str(Path(__file__).with_name("scripted_rank.py"))
WITHOUT_WARNINGS = (
    "import runpy, sys, warnings; warnings.simplefilter('error'); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def test_the_sentence_says_who_when_what_and_how() -> None:
    failure = Failure(rank=2, kind="died", message="signal 9", device="oslo-1/gpu0", stage="stage 1", step=12, doing="1B3", checkpoint=10)
    assert failure.sentence == (
        "rank 2 (oslo-1/gpu0, stage 1) died at step 12 while running backward of micro-batch 3 (signal 9); every rank stops; "
        "the last checkpoint is step 10"
    )
    bare = Failure(rank=0, kind="raised", message="ValueError: no", doing="starting")
    assert bare.sentence == "rank 0 failed while starting: ValueError: no; every rank stops; there is no checkpoint"


@pytest.mark.parametrize(
    ("doing", "stage", "words"),
    [
        ("1F0", "stage 1", "while running forward of micro-batch 0 ("),
        ("2F0", "stage 0 and stage 2", "while running forward of micro-batch 0 in stage 2 ("),
        ("1SB3", "stage 1", "while sending the gradient of micro-batch 3 ("),
        ("O", "stage 1", "while making the optimizer's step ("),
        ("capturing the model", "stage 1", "while capturing the model ("),
    ],
)
def test_actions_are_said_in_words(doing: str, stage: str, words: str) -> None:
    assert words in Failure(rank=0, kind="died", message="signal 9", stage=stage, doing=doing).sentence


def test_silence_is_counted_from_the_last_change() -> None:
    freshness = Freshness(deadline_seconds=4.0)
    assert freshness.silent({1: 1, 2: 1}, now=0.0) == []
    assert freshness.silent({1: 2, 2: 1}, now=2.0) == []
    assert freshness.silent({1: 3, 2: 1}, now=4.0) == []
    assert freshness.silent({1: 4, 2: 1}, now=4.5) == [2]


def test_who_slept_itself_does_not_judge_the_others() -> None:
    freshness = Freshness(deadline_seconds=4.0)
    assert freshness.silent({1: 1}, now=0.0) == []
    assert freshness.silent({1: 1}, now=1000.0) == []
    assert freshness.silent({1: 1}, now=1002.0) == []
    assert freshness.silent({1: 1}, now=1004.0) == []
    assert freshness.silent({1: 1}, now=1004.1) == [1]


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_rank_is_silent_when_nothing_came_for_the_deadline(beats: list[bool]) -> None:
    """One look a second, a beat or none before each; the deadline is 3.5 s."""
    freshness, count, since = Freshness(deadline_seconds=3.5), 0, 0
    for second, beat in enumerate(beats):
        count += beat
        since = 0 if beat or second == 0 else since + 1
        assert freshness.silent({7: count}, now=float(second)) == ([7] if since > 3.5 else [])


def test_the_first_failure_told_is_the_one_believed() -> None:
    store = HashStore()
    prepare(store, range(2))
    prepare(store, range(2))
    first, second = (Failure(rank=rank, kind="raised", message="no") for rank in (1, 0))
    assert condemn(store, first) == first
    assert condemn(store, second) == first


def test_a_failure_carries_what_the_rank_last_said() -> None:
    beat = Heartbeat(rank=1, device="oslo/cpu1", stage="stage 0", place="", pid=1, count=3, step=4, doing="0F2", checkpoint=2)
    other = Heartbeat(rank=0, device="oslo/cpu0", stage="stage 0", place="", pid=2, count=3, step=4, doing="0F2", checkpoint=3)
    failure = Failure.of(1, {0: other, 1: beat}, "died", "signal 11")
    assert (failure.device, failure.step, failure.doing, failure.checkpoint) == ("oslo/cpu1", 4, "0F2", 3)
    assert Failure.of(5, {0: other}, "died", "signal 11").sentence.startswith("rank 5 died while starting (signal 11)")


def test_ranks_that_have_said_nothing_are_left_out() -> None:
    store = HashStore()
    prepare(store, range(3))
    assert read_heartbeats(store, range(3)) == {}


def test_the_host_of_the_store_stays_until_the_others_know_why_it_failed() -> None:
    """It used to count itself among those who know, and took the store away with it: the others then said that it had died."""
    store = HashStore()
    role = Role(rank=0, world_size=2, local_rank=0, local_world_size=2, master_addr="127.0.0.1", master_port=1, source="slurm")
    watcher = Watcher(role, store, device="oslo/cpu0", beat_seconds=0.02)
    watcher.start()
    ending = threading.Thread(target=watcher.failed_here, args=(ArithmeticError("the loss went wrong"),))
    ending.start()
    ending.join(0.5)
    assert ending.is_alive()
    store.add("atoll/told", 1)  # the other rank has read it
    ending.join(60)
    assert not ending.is_alive()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def without_patience(said: str) -> str:
    """Without what a rank says when starting the others takes half a minute, as it may on a busy machine."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if " not joined after " not in line and " to answer for " not in line)


def ends(culprit: int, action: str, ranks: int = 2) -> list[tuple[int, str]]:
    """Exit code and stderr of ranks started as Slurm starts them: nobody hosts the store for them and nobody looks after them."""
    port = free_port()
    environs = [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": str(ranks),
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "localhost",
        }
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(ranks)
    ]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    if action != "freeze":
        command = [sys.executable, "-c", WITHOUT_WARNINGS, SCRIPT, str(culprit), action]
        with ThreadPoolExecutor(ranks) as together:
            ended = list(together.map(lambda environ: run_warm(command, env=outside | environ), environs))
        return [(process.returncode, without_patience(process.stderr)) for process in ended]
    command = [sys.executable, "-W", "error", SCRIPT, str(culprit), action]
    processes = [subprocess.Popen(command, env=outside | environ, stderr=subprocess.PIPE, text=True) for environ in environs]
    try:
        order = [rank for rank in range(ranks) if rank != culprit]
        said = {rank: processes[rank].communicate()[1] for rank in order}
        processes[culprit].kill()  # it would be waited for
        said[culprit] = processes[culprit].communicate()[1]
        return [(processes[rank].returncode, without_patience(said[rank])) for rank in range(ranks)]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(
    ("culprit", "action", "sentence"),
    [
        (1, "die", "rank 1 (oslo/cpu1, stage 1) died at step 3 while running backward of micro-batch 3 (its process is gone)"),
        (0, "die", "rank 0 (oslo/cpu0, stage 1) died at step 3 while running backward of micro-batch 3 (the store that it hosts at"),
        (
            0,
            "freeze",
            "rank 0 (oslo/cpu0, stage 1) fell silent at step 3 while running backward of micro-batch 3 (the store that it hosts at",
        ),
        (
            0,
            "raise",
            "rank 0 (oslo/cpu0, stage 1) failed at step 3 while running backward of micro-batch 3: ArithmeticError: the loss went wrong",
        ),
    ],
)
def test_without_a_launcher_the_other_rank_names_the_culprit(culprit: int, action: str, sentence: str) -> None:
    code, said = ends(culprit, action)[1 - culprit]
    assert code == VICTIM_EXIT_CODE
    assert said.count("\n") == 1, said
    assert said.startswith(f"atoll: rank {1 - culprit} stops: {sentence}")


def test_without_a_launcher_ranks_leave_together_and_without_a_word() -> None:
    assert ends(0, "train") == [(0, ""), (0, "")]
