"""`atoll presets`: every model that can be planned by name."""

import json

import pytest

from atoll.cli.main import run
from atoll.graph import PRESETS


def test_the_table_names_every_preset_within_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert {entry.name for entry in PRESETS} <= {line.split()[0] for line in lines if line.strip()}


def test_the_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["presets", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == [entry.name for entry in PRESETS]
    assert [entry["batch_size"] for entry in listed] == [entry.batch_size for entry in PRESETS]
    assert all({"parameters", "precision", "description", "optimizer", "source"} <= set(entry) for entry in listed)
