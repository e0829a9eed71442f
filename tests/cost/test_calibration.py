"""Calibrations survive their files, say what is wrong with others, and carry their meaning."""

from pathlib import Path

import pytest

from atoll.cost import Calibration, LayerTime, calibration_names, load_calibration, meaning, named_calibration
from atoll.errors import PlanError


def test_json_round_trip(tmp_path: Path) -> None:
    times = (LayerTime(layer="a", kind="A100-80GB", samples=4, forward_seconds=1.0, backward_seconds=2.0),)
    calibration = Calibration(matmul_efficiency=0.7, layer_times=times, source="a test")
    (tmp_path / "c.json").write_text(calibration.to_json())
    assert load_calibration(tmp_path / "c.json") == calibration


def test_every_constant_has_a_meaning() -> None:
    for name in Calibration.__struct_fields__:
        assert bool(meaning(name)) == (name not in ("layer_times", "source"))
    assert meaning("nonsense") == ""


def test_all_that_ship_can_be_loaded() -> None:
    assert calibration_names()[0] == "defaults"
    assert named_calibration("defaults") == Calibration()
    for name in calibration_names()[1:]:
        assert named_calibration(name).source != "defaults"
    with pytest.raises(PlanError, match="a100-megatron"):
        named_calibration("a100")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("c.json", '{"matmul_eficiency": 0.5}', "matmul_eficiency"),
        ("c.json", '{"matmul_efficiency": -1}', "matmul_efficiency"),
        ("c.json", '{"sync_overlap": 1.5}', "sync_overlap"),
        ("c.json", "not json", "not a calibration"),
        ("c.toml", "jitter = 'much'", "jitter"),
        ("c.toml", "= 3", "not a calibration"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=complaint) as raised:
        load_calibration(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        load_calibration(tmp_path / "none.json")
