"""The process that forks commands for tests."""

import subprocess
import sys
from pathlib import Path

from tests.warm import ROOT


def test_it_ends_with_the_process_that_asks_even_if_that_is_killed(tmp_path: Path) -> None:
    """A killed process closes its pipes, and that is all the server hears of it."""
    command = [sys.executable, "-m", "tests.warm", str(tmp_path / "socket")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdin.close()
        assert process.wait() == 0
