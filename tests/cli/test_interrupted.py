"""What `atoll run` says of a lockstep run that was asked to stop."""

from pathlib import Path

import pytest

from atoll.cli.main import run
from atoll.runtime.modes.lockstep import supervisor
from atoll.runtime.modes.lockstep.supervisor import LaunchResult

SCRIPT = """import torch
import atoll

job = atoll.Job(
    model=lambda: torch.nn.Linear(6, 3), loss=lambda model, batch: model(batch).square().mean(), data=[torch.randn(6) for _ in range(8)],
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), batch_size=4, steps=2, name="small",
)
"""
PLAN = "plan v1 graph=small cluster=here mode=lockstep schedule=1f1b batch=4 micro_batch=4\nstage 0: layers 0-0: h/0=4\n"


@pytest.mark.parametrize("saved", [0, 1, 2])
def test_a_run_that_made_its_last_step_is_done_though_it_was_asked_to_stop(
    saved: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*arguments: object, **options: object) -> LaunchResult:
        if saved:
            (tmp_path / f"out/checkpoints/step-{saved:08d}").mkdir(parents=True)
            (tmp_path / f"out/checkpoints/step-{saved:08d}/manifest.json").touch()
        return LaunchResult(exit_code=0, restarts=0, interrupted=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "launch", launched)
    Path("train.py").write_text(SCRIPT)
    Path("p.plan").write_text(PLAN)
    assert run(["run", "train.py", "--plan", "p.plan", "--out", "out"]) == (0 if saved == 2 else 130)
    assert ("to go on: atoll run" in capsys.readouterr().err) == (saved == 1)
