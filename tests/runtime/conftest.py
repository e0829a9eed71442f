"""What several tests of the runtime share: two processes are started once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where two processes trained all cases, and what each found."""
    folder = tmp_path_factory.mktemp("training")
    command = [sys.executable, str(Path(__file__).parent / "training_ranks.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder, [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
