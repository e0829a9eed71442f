"""What every test starts from: one thread and fixed random examples, so that results depend neither on the machine's cores nor on luck.

`make soak` asks for the profile `soak`: many more examples, new ones each time.
"""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Shells start what runs in the background with Ctrl-C ignored, which the commands that tests start would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_terminal() -> None:
    """Tests that run two at a time are told the width of a terminal, which changes what commands print."""
    os.environ.pop("COLUMNS", None)
