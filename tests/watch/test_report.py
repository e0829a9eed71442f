"""The report of a run: its story from events alone, and predicted against measured where there is more in its directory."""

import json
import os
import socket
import time
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from atoll.cli.report import report_view
from atoll.cluster import load_cluster
from atoll.cost import Cost, cost
from atoll.errors import AtollError, JobError
from atoll.events import (
    AnyEvent,
    CheckpointSaved,
    EventLog,
    MemberChanged,
    NonFinite,
    Restarted,
    RunFinished,
    RunStarted,
    StepFinished,
    WorkerFailed,
)
from atoll.graph import preset
from atoll.plan import Plan, Replica, Stage
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.measurement import (
    Bucket,
    Exchange,
    MeasuredSpan,
    MeasuredStep,
    RankMeasured,
    StageMeasured,
    write_measured,
)
from atoll.runtime.run_directory import RunDirectory, RunSettings, run_lock
from atoll.watch.report import RunReport, is_silent, read_report

KEYS = {"mode", "steps", "losses", "samples", "step_seconds", "link_bytes", "events"}
BATCH = 8
CLUSTER = """
name = "here"
[[site]]
name = "oslo"
  [[site.host]]
  name = "a"
  devices = [{ kind = "core", count = 2, memory = "4 GB" }]
  link = { bandwidth = "2 GB/s", latency = "5 us" }
[[device_kind]]
name = "core"
cpu = true
memory = "8 GB"
memory_bandwidth = "8 GB/s"
flops = { fp32 = "40 GFLOPS" }
"""


def started(mode: str = "lockstep", steps: int = 10) -> RunStarted:
    return RunStarted(
        at_seconds=0.0,
        name="job",
        mode=mode,
        steps=steps,
        batch_size=BATCH,
        samples=100,
        parameters=5,
        devices=("a/0", "a/1"),
        precision="fp32",
        seed=0,
        unix_seconds=0.0,
    )


def step(number: int, loss: float | None = None, *, seconds: float = 0.5, applied: bool = True) -> StepFinished:
    return StepFinished(
        at_seconds=float(number),
        step=number,
        loss=loss if loss is not None else 1 / number,
        samples=BATCH,
        weight=BATCH,
        seconds=seconds,
        learning_rate=0.1,
        applied=applied,
    )


def saved(number: int) -> CheckpointSaved:
    return CheckpointSaved(at_seconds=0.0, step=number, path="", size_bytes=1, blocked_seconds=0.0, seconds=0.0)


def finished(reason: str, steps: int) -> RunFinished:
    return RunFinished(at_seconds=9.0, reason=reason, steps=steps, samples=steps * BATCH, seconds=9.0)  # type: ignore[arg-type]


FAILED = WorkerFailed(at_seconds=1.0, rank=1, device="a/1", stage="stage 1", step=8, doing="forward", message="rank 1 died")
AGAIN = Restarted(at_seconds=1.0, generation=1, max_restarts=2, reason="rank 1 died")


def told(directory: Path, *events: AnyEvent) -> RunReport:
    with EventLog(directory) as log:
        for event in events:
            log(event)
    return read_report(directory)


def shown(report: RunReport) -> str:
    out = StringIO()
    Console(file=out, width=200).print(report_view(report))
    return out.getvalue()


def steps(first: int, last: int) -> list[StepFinished]:
    return [step(number) for number in range(first, last + 1)]


def test_a_run_alone_has_its_story_and_lacks_nothing(tmp_path: Path) -> None:
    report = told(tmp_path, started("alone", 3), *steps(1, 3), finished("done", 3))
    assert (report.mode, report.state, report.steps) == ("alone", "done", 3)
    assert report.losses == [1.0, 1 / 2, 1 / 3]
    assert report.samples.committed == 24
    assert report.events == {"run_finished": 1, "run_started": 1, "step_finished": 3}
    assert report.facts["link_bytes"] == {}
    assert report.missing == []
    assert set(msgspec.json.decode(report.to_json())) >= KEYS


def test_steps_done_again_after_a_restart_are_counted_apart(tmp_path: Path) -> None:
    report = told(tmp_path, started(), *steps(1, 5), saved(5), *steps(6, 7), FAILED, AGAIN, started(), *steps(6, 10), finished("done", 10))
    assert report.state == "done"
    assert report.losses == [1 / number for number in range(1, 11)]  # each step once
    assert msgspec.to_builtins(report.samples) == {"committed": 80, "lost": 0, "redone": 16}
    assert report.events["worker_failed"] == 1


def test_what_a_failed_run_did_after_its_checkpoint_is_lost(tmp_path: Path) -> None:
    report = told(tmp_path, started(), *steps(1, 5), saved(5), *steps(6, 7), FAILED)
    assert (report.state, report.message) == ("failed", "rank 1 died")
    assert msgspec.to_builtins(report.samples) == {"committed": 40, "lost": 16, "redone": 0}
    assert report.steps == 7


def test_a_run_that_failed_before_its_first_checkpoint_and_one_that_diverged(tmp_path: Path) -> None:
    first = told(tmp_path / "a", started(), *steps(1, 2), FAILED)
    assert msgspec.to_builtins(first.samples) == {"committed": 0, "lost": 16, "redone": 0}
    second = told(tmp_path / "b", started(), step(1), NonFinite(at_seconds=1.0, step=2, what="loss", value="nan"))
    assert (second.state, second.message) == ("failed", "step 2: the loss is nan")


def test_skipped_steps_are_lost_samples(tmp_path: Path) -> None:
    report = told(tmp_path, started(steps=2), step(1, applied=False), step(2), finished("done", 2))
    assert msgspec.to_builtins(report.samples) == {"committed": 8, "lost": 8, "redone": 0}


def test_a_run_under_way_is_told_from_one_that_ended_without_a_word(tmp_path: Path) -> None:
    assert told(tmp_path, started(), *steps(1, 4)).state == "running"
    long_ago = time.time() - 3600
    os.utime(tmp_path / "events.jsonl", (long_ago, long_ago))
    report = read_report(tmp_path)
    assert (report.state, report.message) == ("silent", "last heard of 60 min ago")
    assert report.samples.lost == 32  # nothing of it was saved


def test_a_killed_run_is_not_called_under_way(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        assert told(tmp_path, started(), *steps(1, 4)).state == "running"
    assert read_report(tmp_path).state == "silent"  # at once: the kernel has taken the lock from whoever held it


def test_a_worker_whose_process_ended_is_dead_whatever_is_not_heard_of_it_then(tmp_path: Path) -> None:
    gone = [MemberChanged(at_seconds=2.0, name="worker-0", state=state) for state in ("dead", "silent")]  # type: ignore[arg-type]
    report = told(tmp_path, started("swarm"), MemberChanged(at_seconds=1.0, name="worker-0", state="active", stages=(0,)), *gone)
    assert [member.ending for member in report.facts["swarm"].members] == ["dead"]


def test_a_swarm_nobody_listens_for_is_not_under_way(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        address = f"127.0.0.1:{coordinator.getsockname()[1]}"
        (tmp_path / "started.json").write_text(json.dumps({"at_seconds": 0.0, "unix_seconds": 1.0, "address": address}))
        told(tmp_path, started("swarm"), MemberChanged(at_seconds=1.0, name="anna", state="active", stages=(0,)), *steps(1, 4))
        minutes_ago = time.time() - 300
        os.utime(tmp_path / "events.jsonl", (minutes_ago, minutes_ago))
        assert read_report(tmp_path).state == "running"  # a long step, or an evaluation
    report = read_report(tmp_path)
    assert (report.state, report.message) == ("silent", "last heard of 5 min ago")
    assert [member.ending for member in report.facts["swarm"].members] == ["unknown"]
    shown = StringIO()
    Console(file=shown, width=200).print(report_view(report))
    assert "ended without a word, or stands still: last heard of 5 min ago" in shown.getvalue()


@pytest.mark.parametrize(
    ("age", "step", "listening", "silent"),
    [
        (5.0, 1.0, None, False),
        (121.0, 1.0, None, True),
        (121.0, 60.0, None, False),
        (601.0, 60.0, None, True),
        (31.0, 60.0, False, True),
        (5.0, 1.0, False, False),
        (9000.0, 1.0, True, False),
    ],
)
def test_who_is_silent(age: float, step: float, listening: bool | None, silent: bool) -> None:
    assert is_silent(age, step, listening) is silent


def test_the_median_is_of_the_steps_since_the_last_start(tmp_path: Path) -> None:
    slow = [step(number, seconds=9.0) for number in range(1, 6)]
    fast = [step(6, seconds=3.0), step(7, seconds=2.0), *(step(number, seconds=1.0) for number in range(8, 11))]
    assert told(tmp_path, started(), *slow, started(), *fast).step_seconds.median == 1.0


def test_a_start_with_nothing_left_to_do_is_told_as_that(tmp_path: Path) -> None:
    report = told(tmp_path, started(steps=3), *steps(1, 3), finished("done", 3), started(steps=3), finished("done", 3))
    assert (report.state, report.steps, report.steps_since_start, report.step_seconds.median) == ("done", 3, 0, 0.5)
    assert report.conclusion == "No step was left to do when the run was last started; what is said here was measured before."
    shown = StringIO()
    Console(file=shown, width=200).print(report_view(report))
    assert "nothing was left to do: all 3 steps had been made before, the last ones in 500 ms each" in shown.getvalue()
    assert "no step was finished" not in shown.getvalue()


def test_steps_of_a_plan_before_are_not_compared_with_this_plans_prediction(tmp_path: Path) -> None:
    run_of(tmp_path, pipeline())
    report = told(tmp_path, started(steps=3), *steps(1, 3), finished("done", 3), started(steps=3), finished("done", 3))
    assert report.step_seconds.predicted is None
    assert "plan.json: no step was made under this plan, so there is nothing to compare" in report.missing


def test_waits_for_data_are_told_with_the_workers_that_would_cure_them(tmp_path: Path) -> None:
    """A step computes for 0.1 s; its 8 samples take 50 ms each to load, of which nothing is hidden: four processes are needed."""

    def loaded(number: int, waited: float) -> StepFinished:
        return msgspec.structs.replace(step(number, seconds=0.1 + waited), data_seconds=waited, loading_seconds=8 * 0.05)

    slow = [loaded(1, 9.0), *(loaded(number, 0.4) for number in (2, 3, 4))]  # the first waits for workers to begin
    report = told(tmp_path / "slow", started("alone"), *slow, finished("done", 4))
    assert report.data is not None
    assert (report.data.waited_share, report.data.workers_needed) == (pytest.approx(0.8), 4)
    assert "Training waited for data 80% of the time; num_workers=4 would cure it." in shown(report)
    assert json.loads(report.to_json())["data"]["loading_seconds_per_sample"] == pytest.approx(0.05)
    busy = told(tmp_path / "busy", msgspec.structs.replace(started("alone"), num_workers=4), loaded(1, 0.0), loaded(2, 0.1))
    assert "50% of the time, with num_workers=4: a sample takes 50 ms to load" in shown(busy)
    fine = told(tmp_path / "fine", msgspec.structs.replace(started("alone"), num_workers=4), loaded(1, 0.0), loaded(2, 0.001))
    assert "waited for data" not in shown(fine)


def test_a_runs_time_goes_on_after_its_last_event(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.last_moment() == 0.0
    told(tmp_path, started(), *steps(1, 3))
    assert directory.last_moment() == 3.0
    with directory.events.open("ab") as file:
        file.write(b'{"event":"step_fini')  # a crash
    assert directory.last_moment() == 3.0


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"is no run's directory: run\.json is missing"):
        read_report(tmp_path)
    with pytest.raises(JobError, match="there is no such directory"):
        read_report(tmp_path / "nowhere")


def test_a_run_that_was_only_begun_says_so(tmp_path: Path) -> None:
    RunDirectory(tmp_path).create(RunSettings(script="/x.py"))
    report = read_report(tmp_path)
    assert (report.mode, report.state, report.steps, report.losses) == ("lockstep", "not started", 0, [])
    assert report.step_seconds.median is None
    assert report.missing == ["plan.json: without it nothing can be compared"]


def layers() -> int:
    return len(preset("gpt2", batch_size=BATCH).graph.layers)


def pipeline() -> Plan:
    rows = ((0, 6, "a/0"), (6, layers(), "a/1"))
    stages = tuple(Stage(start=a, stop=b, replicas=(Replica(devices=(name,), samples=(BATCH,)),)) for a, b, name in rows)
    return Plan(graph="gpt2", cluster="here", batch_size=BATCH, micro_batch_size=4, stages=stages)


def replicas() -> Plan:
    rows = tuple(Replica(devices=(name,), samples=(4,)) for name in ("a/0", "a/1"))
    return Plan(graph="gpt2", cluster="here", batch_size=BATCH, micro_batch_size=4, stages=(Stage(start=0, stop=layers(), replicas=rows),))


def run_of(path: Path, plan: Plan, *, with_cluster: bool = True) -> tuple[RunDirectory, Cost]:
    """A run's directory before its ranks have measured anything."""
    directory = RunDirectory(path)
    directory.create(RunSettings(script="/x.py"))
    directory.write_plan(plan)
    (path / "c.toml").write_text(CLUSTER)
    predicted = cost(preset("gpt2", batch_size=BATCH).graph, load_cluster(path / "c.toml"), plan)
    if with_cluster:
        directory.write("cluster.toml", CLUSTER)
        directory.write("predicted.json", msgspec.json.encode(predicted))
    return directory, predicted


def as_predicted(plan: Plan, predicted: Cost, factor: float, exchanges: tuple[Exchange, ...], gradients: int = 0) -> list[RankMeasured]:
    """Ranks that computed `factor` times as long as predicted and exchanged what was said."""
    layout = Layout(plan)
    ranks = []
    for rank, device in enumerate(layout.devices):
        stages = []
        for place in layout.places(rank):
            price = predicted.stages[place.stage]
            own = layout.micro_batches_of(place.stage, place.replica)
            stages.append(
                StageMeasured(
                    stage=place.stage,
                    replica=place.replica,
                    lane=0,
                    tensor=0,
                    samples=4,
                    micro_batches=len(own),
                    forward_seconds=factor * price.forward_seconds,
                    backward_seconds=factor * price.backward_seconds,
                )
            )
        seconds = {
            "forward": sum(stage.forward_seconds * stage.micro_batches for stage in stages),
            "backward": sum(stage.backward_seconds * stage.micro_batches for stage in stages),
            "receive": 0.001,
            "send": 0.0005,
            "data": 0.0001,
            "synchronise": 0.002 if gradients else 0.0,
            "agree": 0.0002,
            "optimizer": predicted.breakdown.get("optimizer", 0.0),
            "other": 0.0,
        }
        spans = (MeasuredSpan("G", 0, 0, 0.1, 0.102), MeasuredSpan("S", -1, -1, 0.1, 0.102)) if gradients else ()
        ranks.append(
            RankMeasured(
                rank=rank,
                device=device,
                accelerator="cpu",
                threads=1,
                first_step=1,
                steps=5,
                step_seconds=factor * predicted.step_seconds,
                seconds=seconds,
                total_seconds={},
                stages=tuple(stages),
                exchanges=exchanges,
                buckets=(Bucket(ranks=(0, 1), stage=0, bytes=gradients),) if gradients else (),
                peak_memory_bytes=10**8,
                recent=(MeasuredStep(step=5, unix_seconds=100.0, seconds=0.2, spans=spans),),
            )
        )
    return ranks


def log_steps(directory: RunDirectory, seconds: float) -> None:
    with EventLog(directory.path) as log:
        log(started(steps=5))
        for number in range(1, 6):
            log(step(number, seconds=seconds))
        log(finished("done", 5))


def test_everything_is_compared(tmp_path: Path) -> None:
    plan = pipeline()
    directory, predicted = run_of(tmp_path, plan)
    log_steps(directory, 3 * predicted.step_seconds)
    sends = (Exchange(kind="send", ranks=(0, 1), calls=2, bytes=1000), Exchange(kind="send", ranks=(1, 0), calls=2, bytes=500))
    for rank in as_predicted(plan, predicted, 3.0, sends):
        write_measured(directory, rank)
    report = read_report(tmp_path)
    assert report.missing == []
    assert report.step_seconds.median == pytest.approx(3 * predicted.step_seconds)
    assert report.step_seconds.predicted == predicted.step_seconds
    for stage, price in zip(report.facts["stages"], predicted.stages, strict=True):
        assert stage.forward_seconds.predicted == price.forward_seconds
        assert stage.forward_seconds.measured == pytest.approx(3 * price.forward_seconds)
        assert stage.wait_seconds.measured == pytest.approx(0.001)
    assert report.facts["link_bytes"] == {"inside hosts": 1500.0}
    (link,) = report.facts["links"]
    assert link.bytes.predicted == predicted.link_bytes["inside hosts"]
    assert report.facts["memory_bytes"]["a/1"].measured == 10**8
    assert report.facts["differs_most"].what == "compute"
    assert report.conclusion.startswith("A step took 3 times as long as predicted. Most of the difference is in compute: ")


def test_gradients_are_compared_with_what_replicas_were_to_exchange(tmp_path: Path) -> None:
    plan = replicas()
    directory, predicted = run_of(tmp_path, plan)
    log_steps(directory, predicted.step_seconds)
    counted = (Exchange(kind="all_reduce", ranks=(0, 1), calls=2, bytes=4032),)
    for rank in as_predicted(plan, predicted, 1.0, counted, gradients=4000):
        write_measured(directory, rank)
    report = read_report(tmp_path)
    gradients, last = report.facts["collectives"]
    assert (gradients.what, gradients.calls, gradients.bytes) == ("gradients of stage 0", 1, 4000)
    assert gradients.seconds.measured == pytest.approx(0.002, rel=1e-3)
    assert gradients.seconds.predicted == predicted.stages[0].sync_seconds
    assert (last.what, last.calls, last.bytes) == ("loss and norm", 1, 32)
    assert report.facts["link_bytes"] == {"inside hosts": 8064.0}
    assert report.conclusion.startswith("Prediction and reality agree: a step took +0% against the prediction.")


def test_what_is_missing_is_said_and_the_rest_reported(tmp_path: Path) -> None:
    plan = pipeline()
    directory, predicted = run_of(tmp_path, plan, with_cluster=False)
    log_steps(directory, 0.5)
    write_measured(directory, as_predicted(plan, predicted, 1.0, ())[1])
    report = read_report(tmp_path)
    assert [line.split(":")[0] for line in report.missing] == ["cluster.toml", "predicted.json", "measured/"]
    assert "a/0 have written nothing" in report.missing[-1]
    assert report.step_seconds.median == 0.5
    assert report.step_seconds.predicted is None
    assert report.facts["stages"][0].forward_seconds.measured is None
    assert report.facts["stages"][1].forward_seconds.measured is not None
    assert report.facts["link_bytes"] == {}


def test_spoilt_files_are_named(tmp_path: Path) -> None:
    directory, predicted = run_of(tmp_path, pipeline())
    log_steps(directory, predicted.step_seconds)
    directory.write("predicted.json", "{}")
    with pytest.raises(AtollError, match=r"predicted\.json: this is not a prediction"):
        read_report(tmp_path)
