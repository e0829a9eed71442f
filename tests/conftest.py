"""What every test starts from: one thread and fixed random examples, so that results depend neither on the machine's cores nor on luck.

`make soak` asks for the profile `soak`: many more examples, new ones each time.
"""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the commands that tests start: threads that wait for one another burn what others need

# Files that take longest, of the tests that run several files at a time: one that is begun last is waited for.
LONGEST_FIRST = (
    "runtime/modes/lockstep/test_equality.py",
    "lab/test_ssh.py",
    "runtime/modes/lockstep/test_resume.py",
    "graph/test_capture_models.py",
    "runtime/stage/test_tensor_models.py",
    "runtime/modes/lockstep/test_supervisor.py",
    "simulate/test_fuzz.py",
    "simulate/rounds/test_rounds_fuzz.py",
    "runtime/modes/alone/test_checkpoints.py",
    "runtime/modes/swarm/test_standby.py",
    "test_examples.py",
    "runtime/test_loss_forms.py",
    "runtime/stage/test_expert.py",
    "runtime/modes/swarm/test_processes.py",
    "runtime/checkpoint/test_crash.py",
    "hugging_face/test_trainer.py",
    "runtime/test_batch_loader.py",
    "runtime/modes/toy/test_toy.py",
    "runtime/test_training.py",
    "runtime/test_hugging_face.py",
    "runtime/modes/alone/test_alone.py",
    "runtime/stage/test_program.py",
    "runtime/modes/swarm/test_compute.py",
    "test_layout.py",
    "runtime/test_walk.py",
    "runtime/modes/lockstep/test_failure.py",
    "runtime/modes/lockstep/test_torchrun.py",
    "runtime/supervise/test_ssh.py",
    "cli/test_report.py",
    "runtime/modes/swarm/test_resume.py",
)


# What is imported while tests are collected stays: collecting garbage need not look at it, then or later.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on there is garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first; within a file, and among the others, the order stays."""
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Shells start what runs in the background with Ctrl-C ignored, `nohup` with hang-ups; commands that tests start would inherit that."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True, scope="session")
def no_terminal() -> None:
    """Tests that run two at a time are told the width of a terminal, which changes what commands print."""
    os.environ.pop("COLUMNS", None)
