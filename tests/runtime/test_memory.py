"""What a step frees the next one uses again: the kernel is not asked for the same pages each time."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from atoll.runtime.memory import keep_freed_memory
torch.set_num_threads(1)
keep_freed_memory()
def step():
    total = torch.zeros(10_000_000)
    torch.cat([total[:5], total.clone()])
for _ in range(20):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_step_after_others_takes_no_new_pages() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # of the 29,000 that three rows of 40 MB have
