"""What several tests of the runtime share: two processes are started once a file."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.warm import run_warm


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where two processes trained the cases of the kind that the module names as RANKS, and what each found."""
    folder = tmp_path_factory.mktemp("training")
    done = run_warm([sys.executable, Path(__file__).parent / "training_ranks.py", folder, request.module.RANKS])
    assert done.returncode == 0, done.stderr[-6000:]
    return folder, [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
