"""Memory of this process: the machine's, less where a control group says so."""

import subprocess
import sys

import pytest

from atoll.cluster.memory import host_memory, keep_freed_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    800 kB\nHugePages_Total: 0\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def _write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_without_control_groups(root):
    memory = host_memory(root)
    assert (memory.total_bytes, memory.available_bytes) == (1000 * 1024, 800 * 1024)


def test_version_2_limit_of_a_parent_counts(root):
    _write(root, "proc/self/cgroup", "0::/pod/job\n")
    _write(root, "sys/fs/cgroup/pod/job/memory.max", "max\n")
    _write(root, "sys/fs/cgroup/pod/memory.max", "500000\n")
    _write(root, "sys/fs/cgroup/pod/memory.current", "300000\n")
    _write(root, "sys/fs/cgroup/pod/memory.stat", "anon 5\ninactive_file 100000\n")
    memory = host_memory(root)
    assert (memory.total_bytes, memory.available_bytes) == (500_000, 300_000)


def test_version_1(root):
    _write(root, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\nnonsense\n")
    _write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    _write(root, "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "400000\n")
    _write(root, "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "450000\n")
    memory = host_memory(root)
    assert (memory.total_bytes, memory.available_bytes) == (400_000, 0)


def test_this_machine():
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_keeping_freed_memory_says_whether_it_took_effect():
    assert keep_freed_memory() in (True, False)
    assert keep_freed_memory() == keep_freed_memory(), "it may be asked for again"


SCRIPT = """
import resource
import torch
from atoll.cluster.memory import keep_freed_memory
torch.set_num_threads(1)
keep_freed_memory(2**31 - 1, one_arena=True)
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
