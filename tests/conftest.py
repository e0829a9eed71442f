"""What every test starts from: one thread, so that results do not depend on the machine's cores."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
