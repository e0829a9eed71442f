"""`--calibration FILE`: what cannot be is refused with the file and the key."""

from pathlib import Path

import pytest

from atoll.cli.main import run
from tests.cli.test_main import PLAN, TINY

TIMED = 'layer_times = [{{ layer = "a", kind = "A100-80GB", samples = {}, forward_seconds = {}, backward_seconds = {} }}]'


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (TIMED.format(0, 1.0, 1.0), "layer_times[0].samples"),
        (TIMED.format(-4, 1.0, 1.0), "layer_times[0].samples"),
        (TIMED.format(4, -1.0, 1.0), "layer_times[0].forward_seconds"),
        (TIMED.format(4, 1.0, -1.0), "layer_times[0].backward_seconds"),
        (TIMED.format(4, "nan", 1.0), "layer_times[0].forward_seconds"),
        ("matmul_efficiency = 0", "matmul_efficiency"),
        ("memory_efficiency = 1.6", "memory_efficiency"),
        ("host_link_efficiency = 80", "host_link_efficiency"),
        ("network_efficiency = nan", "network_efficiency"),
        ("step_seconds = inf", "step_seconds"),
        ("step_seconds = nan", "step_seconds"),
    ],
)
def test_constants_that_cannot_be_are_refused(
    text: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("constants.toml").write_text(text)
    assert run(["plan", "bert-large", "-c", "tiny.toml", "--calibration", "constants.toml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: constants.toml: not a calibration: ")
    assert key.replace("[0]", "") in error.replace("[0]", "").replace("[...]", "")


def test_what_was_measured_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("good.plan").write_text(PLAN)
    Path("constants.toml").write_text("step_seconds = 0.5\n" + TIMED.format(4, 0.0, 1.0))
    assert run(["plan", "bert-large", "-c", "tiny.toml", "--check", "good.plan", "--calibration", "constants.toml"]) == 0
