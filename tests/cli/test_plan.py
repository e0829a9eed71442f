"""`atoll plan`: what it prints and writes."""

import json
from pathlib import Path

import msgspec
import pytest

from atoll.cli.main import run
from atoll.cli.render import plan_view, show
from atoll.cli.target import load_target
from atoll.cluster import Cluster, load_cluster
from atoll.cost import cost
from atoll.graph import preset
from atoll.plan import load_plan, parse_plan, validate
from atoll.units import format_seconds
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
        "batch share",
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


def test_checking_a_plan_with_staleness_says_what_it_brings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("stale.plan").write_text(PLAN.replace("cluster=tiny", "cluster=tiny mode=swarm staleness=1"))
    assert run(["plan", "bert-large", "-c", "tiny.toml", "--check", "stale.plan", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    (said,) = found["reasons"]
    graph, cluster = preset("bert-large").graph, load_cluster("tiny.toml")
    stale = load_plan("stale.plan")
    without = cost(graph, cluster, msgspec.structs.replace(stale, staleness=0), optimizer=preset("bert-large").optimizer)
    assert f"instead of {format_seconds(without.step_seconds)}" in said
    assert run(["plan", "bert-large", "-c", "tiny.toml", "--check", "stale.plan"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


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


def test_planning_prints_the_plan_and_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "resnet50", "-c", "tiny.toml", "--batch-size", "64"]) == 0
    out = capsys.readouterr().out
    for words in ("resnet50", "batch 64", "samples/s", "Why", "bottleneck", "considered", "Next best"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100


def test_planned_json_is_valid_written_and_loadable(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "resnet50", "-c", "tiny.toml", "--top", "2", "--json", "-o", "p.json", "--codec", "none"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert_documented(document)
    assert 1 <= len(document["plans"]) <= 2
    assert "wrote p.json" in captured.err
    written = load_plan("p.json")
    assert written == parse_plan(document["plans"][0]["text"])
    validate(written, preset("resnet50").graph, load_cluster("tiny.toml"))


def test_what_fits_nowhere_is_the_users_to_mend(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "gpt3-175b", "-c", "tiny.toml"]) == 2
    assert capsys.readouterr().err.startswith("error: no plan fits gpt3-175b")


SCRIPT = """
import torch
import atoll
print("the script says hello")
job = atoll.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)),
    loss=lambda model, batch: (model(batch) ** 2).mean(),
    data=torch.zeros(64, 8),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    batch_size=16,
    steps=3,
    name="small",
)
"""


def test_a_script_is_captured_and_what_it_prints_stays_out_of_the_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT)
    target = load_target("train.py")
    assert (target.graph.name, target.batch_size, target.optimizer) == ("small", 16, "momentum")
    assert run(["plan", "train.py", "-c", "tiny.toml", "--json"]) == 0
    captured = capsys.readouterr()
    assert_documented(json.loads(captured.out))
    assert "the script says hello" in captured.err
