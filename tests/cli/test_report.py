"""`atoll run` with real processes, what it leaves behind, `atoll report` on it, and the next plan with what was measured."""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.main import run
from atoll.cluster.host_name import this_host
from atoll.runtime.modes.lockstep.schedule import Schedule
from tests.runtime.modes.lockstep.read_trace import read_chrome_trace
from tests.warm import run_warm

SCRIPT = """
import torch
from torch import nn

import atoll


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(200, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(64, 200, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Data:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        words = (torch.arange(17) * (i + 3)) % 200
        return words[:-1], words[1:]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def told(event):
    print("told", event.kind)


job = atoll.Job(model=Tied, loss=loss, data=Data(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), batch_size=8,
                micro_batch_size=2, steps=20, callbacks=[told])

if __name__ == "__main__":
    job.run()
"""
CLUSTER = f"""
name = "two"
[[site]]
name = "here"
  [[site.host]]
  name = "{this_host()}"
  devices = [{{ kind = "core", count = 2, memory = "4 GB" }}]
  link = {{ bandwidth = "2 GB/s", latency = "20 us" }}
[[device_kind]]
name = "core"
cpu = true
memory = "8 GB"
memory_bandwidth = "8 GB/s"
flops = {{ fp32 = "40 GFLOPS" }}
[device_kind.measured]
threads = 1
operator = "1 us"
"""
PLAN = f"""plan v1 graph=job cluster=two batch=8 micro_batch=4
stage 0: layers 0-2: {this_host()}/0=8
stage 1: layers 3-5: {this_host()}/1=8
"""


def called(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command in this process; what other processes print goes elsewhere."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def answer(*arguments: object) -> Any:
    code, out, err = called(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory with a script, a cluster and a pipeline of two processes that has run in RUN; and what the command printed."""
    folder = tmp_path_factory.mktemp("report")
    for name, content in (("train.py", SCRIPT), ("two.toml", CLUSTER), ("two.plan", PLAN)):
        (folder / name).write_text(content)
    options = ["-c", folder / "two.toml", "--plan", folder / "two.plan", "--out", folder / "RUN"]
    done = run_warm([sys.executable, "-c", "from atoll.cli import main; main()", "run", folder / "train.py", *options])
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_run_leaves_its_schedule_its_trace_and_what_each_rank_measured(trained: tuple[Path, str]) -> None:
    run_directory = trained[0] / "RUN"
    assert {path.name for path in (run_directory / "measured").iterdir()} == {"plan.txt", "rank-0000.json", "rank-0001.json"}
    schedule = Schedule.parse((run_directory / "schedule.txt").read_text())
    assert len(schedule) == 2
    spans = read_chrome_trace((run_directory / "trace.json").read_bytes())
    for worker in range(2):
        executed = {str(span.action) for span in spans if span.process == worker}
        assert executed == {str(action) for action in schedule[worker]}  # synchronisation of the tied weights included
    predicted = read_chrome_trace((run_directory / "predicted-trace.json").read_bytes())
    assert {str(span.action) for span in predicted} == {str(action) for row in schedule.actions for action in row}
    ends = {str(span.action): span.end_seconds for span in reversed(spans)}
    assert ends["0F0"] <= ends["1F0"] <= ends["1B0"] <= ends["0B0"]


def test_micro_batches_other_than_the_jobs_are_pointed_out(trained: tuple[Path, str]) -> None:
    assert "the plan's micro-batches have 4 samples, not 2 as the job's micro_batch_size says" in " ".join(trained[1].split())


def test_the_command_ends_with_a_short_report(trained: tuple[Path, str]) -> None:
    assert "predicted" in trained[1]
    assert "compute" in trained[1]
    assert "says more" in trained[1]


def test_the_job_is_tried_before_its_step_is_predicted_and_nobody_is_told_of_the_trial(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    assert "times are of the job, tried here" in " ".join(printed.split())
    assert (printed.count("told run_started"), printed.count("told step_finished")) == (1, 20), "of the run alone"
    events = [json.loads(line) for line in (folder / "RUN" / "events.jsonl").read_text().splitlines()]
    assert [event["phase"] for event in events if event["event"] == "phase_finished"][3:5] == ["plan made", "job tried"]
    (chosen,) = [event for event in events if event["event"] == "plan_chosen"]
    assert chosen["reasons"][-1].startswith("times are of the job, tried here")
    predicted = json.loads((folder / "RUN" / "predicted.json").read_text())["step_seconds"]
    assert chosen["step_seconds"] == predicted == answer("report", folder / "RUN")["step_seconds"]["predicted"]


def test_the_report_compares_and_counts(trained: tuple[Path, str]) -> None:
    report = answer("report", trained[0] / "RUN")
    assert (report["mode"], report["state"], report["steps"], len(report["losses"])) == ("lockstep", "done", 20, 20)
    assert report["samples"] == {"committed": 160, "lost": 0, "redone": 0}
    assert report["missing"] == []
    assert report["step_seconds"]["median"] > 0
    assert report["step_seconds"]["predicted"] > 0
    for stage in report["stages"]:
        for figure in ("forward_seconds", "backward_seconds", "wait_seconds"):
            assert stage[figure]["measured"] > 0
    (link,) = report["links"]
    assert link["name"] == "inside hosts"
    assert link["bytes"]["measured"] == report["link_bytes"]["inside hosts"]
    assert link["bytes"]["measured"] == pytest.approx(link["bytes"]["predicted"], rel=0.02)
    (gradients,) = [row for row in report["collectives"] if row["what"].startswith("gradients")]
    assert gradients["bytes"] == 200 * 64 * 4
    assert report["memory_bytes"][f"{this_host()}/1"]["measured"] > 0
    code, out, _ = called("report", trained[0] / "RUN")
    assert code == 0
    for words in ("predicted", "inside hosts", "loss and norm", "Memory", "Events"):
        assert words in out
    assert "a step took" in " ".join(out.split()).lower()  # as long as predicted, or how far from it


def test_the_next_prediction_is_closer(trained: tuple[Path, str]) -> None:
    folder = trained[0]
    measured = answer("report", folder / "RUN")["step_seconds"]["median"]
    command = ("plan", folder / "train.py", "-c", folder / "two.toml", "--check", folder / "two.plan")
    before = answer(*command)["plans"][0]["predicted"]["step_seconds"]
    after = answer(*command, "--calibration", folder / "RUN" / "calibration.json")["plans"][0]["predicted"]["step_seconds"]
    assert abs(after - measured) < abs(before - measured)


def test_the_weights_load_in_plain_pytorch(trained: tuple[Path, str]) -> None:
    from safetensors.torch import load_file

    from atoll.script import load_job

    folder = trained[0]
    code, _, err = called("export", folder / "RUN", "--to", folder / "model.safetensors")
    assert code == 0, err
    assert "of step 20" in err
    model = load_job(str(folder / "train.py")).build_model("cpu")
    model.load_state_dict(load_file(folder / "model.safetensors"))
    code, _, err = called("export", folder / "RUN", "--to", folder / "other.safetensors", "--step", 3)
    assert code == 2
    assert "no checkpoint of step 3; it has 20" in err


def test_a_run_alone_is_reported_by_its_events(trained: tuple[Path, str], tmp_path: Path) -> None:
    code, _, err = called("run", trained[0] / "train.py", "--alone", "--out", tmp_path / "RUN")
    assert code == 0, err
    alone, together = answer("report", tmp_path / "RUN"), answer("report", trained[0] / "RUN")
    assert alone["mode"] == "alone"
    assert alone["losses"] == pytest.approx(together["losses"], rel=1e-5)
    assert alone["step_seconds"]["predicted"] is None
    assert called("report", tmp_path / "RUN")[0] == 0


def test_no_run_no_report(tmp_path: Path) -> None:
    code, _, err = called("report", tmp_path / "nowhere")
    assert code == 2
    assert "there is no such directory" in err
