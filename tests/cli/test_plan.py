"""`atoll plan`: what it prints and writes."""

import json
from pathlib import Path

import msgspec
import pytest

from atoll.cli.main import run
from atoll.cli.render import plan_view, show
from atoll.cluster import Cluster
from atoll.cost import cost
from atoll.graph import preset
from atoll.plan import load_plan, parse_plan
from tests.cli.test_main import PLAN, TINY
from tests.plan.strategies import make_cluster

FLEET = 'name = "fleet"\n' + "".join(
    f"""
[[site]]
name = "{site}"
network = {{ bandwidth = "100 Gbit/s", latency = "20 us" }}
  [[site.host]]
  count = 16
  devices = [{{ kind = "{kind}", count = 8 }}]
"""
    for site, kind in (("oslo", "A100-80GB"), ("rome", "V100-32GB"))
)
FLEET += '\n[[link]]\nbetween = ["oslo", "rome"]\nbandwidth = "1 Gbit/s"\nlatency = "20 ms"\n'
LARGE = """plan v1 graph=gpt3-13b cluster=fleet batch=512 micro_batch=1
codec int8: oslo–rome
stage 0: layers 0-25 tensor=8 recompute: 16x(oslo-[0-15]/[0-7])=32
stage 1: layers 26-41 tensor=8: 16x(rome-[0-15]/[0-7])=32
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("fleet.toml").write_text(FLEET)
    Path("good.plan").write_text(PLAN)
    Path("large.plan").write_text(LARGE)
    return tmp_path


def test_checking_a_plan_predicts_its_cost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "bert-large", "-c", "tiny.toml", "--check", "good.plan"]) == 0
    out = capsys.readouterr().out
    for words in (
        "bert-large",
        "tiny",
        "lockstep",
        "stage",
        "layers",
        "share of batch",
        "2 × A100-80GB",
        "oslo-0/[0-1]",
        "samples/s",
        "compute",
    ):
        assert words in out


def test_a_plan_of_many_devices_stays_short_and_within_100_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "gpt3-13b", "-c", "fleet.toml", "--check", "large.plan"]) in (0, 1)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert len(out.splitlines()) < 40
    assert "16 × 8 A100-80GB" in out
    assert "oslo–rome" in out
    assert "int8" in out


def test_the_json_of_a_checked_plan_has_the_documented_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "bert-large", "-c", "tiny.toml", "--check", "good.plan", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert_documented(document)
    assert parse_plan(document["plans"][0]["text"]) == load_plan("good.plan")
    assert set(document["plans"][0]["predicted"]["memory_bytes"]) == {"oslo-0/0", "oslo-0/1"}


def assert_documented(document: dict[str, object]) -> None:
    """The keys that DESIGN fixes for `atoll plan --json`."""
    assert {"capture_seconds", "plan_seconds", "plans"} <= set(document)
    plans = document["plans"]
    assert isinstance(plans, list)
    for entry in plans:
        assert {"mode", "text", "stages", "predicted", "reasons"} <= set(entry)
        assert {"step_seconds", "samples_per_second", "memory_bytes", "link_bytes", "breakdown"} <= set(entry["predicted"])
        assert len(entry["stages"]) == len(parse_plan(entry["text"]).stages)


def test_a_plan_that_does_not_fit_is_shown_and_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("big.plan").write_text(PLAN.replace("bert-large", "gpt3-13b").replace("0-25", "0-41"))
    assert run(["plan", "gpt3-13b", "-c", "tiny.toml", "--check", "big.plan"]) == 1
    captured = capsys.readouterr()
    assert "big.plan: the plan does not fit: 2 devices lack memory, oslo-0/" in captured.err
    assert "gpt3-13b" in captured.out


def test_names_are_never_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    text = msgspec.json.encode(make_cluster(hosts=1, devices=1)).replace(b"s0-0", b"[red]s[/]")
    cluster = msgspec.json.decode(text, type=Cluster)
    plan = parse_plan('plan graph=g cluster=c batch=1 micro_batch=1\nstage 0: layers 0-0: "[red]s[/]/0"=1')
    graph = preset("bert-large").graph
    show(plan_view(plan, cost(graph, cluster, plan), graph, cluster))
    assert "[red]s[/]/0" in capsys.readouterr().out


def test_piped_output_has_no_trailing_blanks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["plan", "gpt3-13b", "-c", "fleet.toml", "--check", "large.plan"])
    assert all(line == line.rstrip() for line in capsys.readouterr().out.splitlines())
