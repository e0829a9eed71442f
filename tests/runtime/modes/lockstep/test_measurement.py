"""What a rank records of its steps, what is kept, written and read back, and what all ranks together say of exchanges."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from atoll.cluster import load_cluster
from atoll.errors import JobError
from atoll.plan import Plan, Replica, Stage
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.measurement import (
    Bucket,
    Exchange,
    MeasuredSpan,
    MeasuredStep,
    RankMeasured,
    executed_spans,
    link_bytes,
    measure_links,
    read_measured,
    sync_seconds,
    transfer_seconds,
    write_measured,
)
from atoll.runtime.modes.lockstep.recorder import ExchangeCounter, Recorder, counted
from atoll.runtime.modes.lockstep.trace import chrome_trace
from atoll.runtime.run_directory import RunDirectory
from tests.process_group import process_group
from tests.runtime.modes.lockstep.read_trace import read_chrome_trace

CLUSTER = """
name = "here"
[[site]]
name = "oslo"
network = { bandwidth = "1 GB/s", latency = "50 us" }
  [[site.host]]
  name = "a"
  devices = [{ kind = "core", count = 2, memory = "4 GB" }]
  link = { bandwidth = "2 GB/s", latency = "5 us" }
  [[site.host]]
  name = "b"
  devices = [{ kind = "core", count = 2, memory = "4 GB" }]
  link = { bandwidth = "2 GB/s", latency = "5 us" }
[[device_kind]]
name = "core"
cpu = true
memory = "8 GB"
memory_bandwidth = "8 GB/s"
flops = { fp32 = "40 GFLOPS" }
"""


def pipeline() -> Plan:
    first = Stage(start=0, stop=2, replicas=(Replica(devices=("a/0",), samples=(8,)),))
    second = Stage(start=2, stop=4, replicas=(Replica(devices=("a/1",), samples=(8,)),))
    return Plan(graph="g", cluster="here", batch_size=8, micro_batch_size=3, stages=(first, second))


def recorded(recorder: Recorder, layout: Layout, rank: int) -> RankMeasured:
    return recorder.measured(layout, rank, ())


def record(recorder: Recorder, step: int, *, micro_batches: int = 3, stage: int = 0, seconds: float = 1.0) -> None:
    recorder.begin()
    for kind in "FB":
        for m in range(micro_batches):
            recorder.add(kind, stage, m, recorder.now())
    recorder.add("O", -1, -1, recorder.now())
    recorder.end(step, seconds)


def test_the_last_steps_are_kept_and_all_are_summed() -> None:
    recorder = Recorder(torch.device("cpu"))
    for step in range(1, 51):
        record(recorder, step)
    measured = recorded(recorder, Layout(pipeline()), 0)
    assert [step.step for step in measured.recent] == list(range(31, 51))
    assert measured.steps == 50
    assert sum(measured.total_seconds.values()) == pytest.approx(50.0)  # every second of every step belongs to a part
    assert sum(measured.seconds.values()) == pytest.approx(1.0, rel=1e-3)
    assert measured.step_seconds == 1.0


def test_what_a_step_was_spent_on_is_that_of_the_median_step_of_all_not_of_the_last_ones() -> None:
    recorder = Recorder(torch.device("cpu"))
    for step in range(1, 101):
        record(recorder, step, seconds=3.0 if step <= 70 else 1.0)  # a neighbour left
    measured = recorded(recorder, Layout(pipeline()), 0)
    assert measured.step_seconds == 3.0
    assert sum(measured.seconds.values()) == pytest.approx(3.0)


def test_a_stage_is_told_by_its_most_common_micro_batch() -> None:
    recorder = Recorder(torch.device("cpu"))
    record(recorder, 1)
    (stage,) = recorded(recorder, Layout(pipeline()), 0).stages
    assert (stage.samples, stage.micro_batches) == (3, 3)  # of 8 samples: 3, 3 and 2
    assert stage.forward_seconds > 0
    assert stage.backward_seconds > 0


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert read_measured(directory) == []
    recorder = Recorder(torch.device("cpu"))
    record(recorder, 1)
    rows = [recorded(recorder, Layout(pipeline()), rank) for rank in (1, 0)]
    for row in rows:
        write_measured(directory, row)
    assert read_measured(directory) == rows[::-1]
    (tmp_path / "measured" / "rank-0001.json").write_text("{")
    with pytest.raises(JobError, match=r"rank-0001\.json: this is not what a rank measured"):
        read_measured(directory)


def test_a_long_step_is_written_whole_and_others_give_way() -> None:
    recorder = Recorder(torch.device("cpu"))
    for step in (1, 2, 3):
        record(recorder, step, micro_batches=6000)
    measured = recorded(recorder, Layout(pipeline()), 0)
    assert [step.step for step in measured.recent] == [3]


def rank_of(number: int, *steps: MeasuredStep, exchanges: tuple[Exchange, ...] = (), buckets: tuple[Bucket, ...] = ()) -> RankMeasured:
    parts = ("forward", "backward", "receive", "send", "data", "synchronise", "agree", "optimizer", "other")
    return RankMeasured(
        rank=number,
        device=f"a/{number}",
        accelerator="cpu",
        threads=1,
        first_step=1,
        steps=len(steps),
        step_seconds=1.0,
        seconds=dict.fromkeys(parts, 0.001),
        total_seconds={},
        stages=(),
        exchanges=exchanges,
        buckets=buckets,
        peak_memory_bytes=None,
        recent=steps,
    )


def step_of(number: int, unix: float, *spans: tuple[str, int, int, float, float]) -> MeasuredStep:
    return MeasuredStep(step=number, unix_seconds=unix, seconds=1.0, spans=tuple(MeasuredSpan(*span) for span in spans))


def test_ranks_are_laid_over_each_other_and_read_as_a_trace() -> None:
    first = rank_of(0, step_of(5, 100.0, ("D", 0, 0, 0.0, 0.1), ("F", 0, 0, 0.1, 0.3), ("SF", 0, 0, 0.3, 0.31), ("O", -1, -1, 0.8, 0.9)))
    second = rank_of(1, step_of(5, 100.2, ("RF", 1, 0, 0.0, 0.2), ("F", 1, 0, 0.2, 0.4), ("G", 1, 3, 0.4, 0.5), ("A", -1, -1, 0.5, 0.6)))
    spans = executed_spans([first, second])
    told = [(span.process, str(span.action), round(span.begin_seconds, 6)) for span in spans]
    assert told == [(0, "0F0", 0.1), (1, "1RF0", 0.2), (0, "0SF0", 0.3), (1, "1F0", 0.4), (1, "1G", 0.6), (0, "O", 0.8)]
    back = read_chrome_trace(msgspec.json.encode(chrome_trace(spans)))
    assert sorted(str(span.action) for span in back) == sorted(str(span.action) for span in spans)


def test_steps_that_not_all_ranks_kept_are_not_shown() -> None:
    assert executed_spans([rank_of(0, step_of(1, 0.0)), rank_of(1, step_of(2, 0.0))]) == []
    assert executed_spans([]) == []


def test_a_collective_lasts_from_when_its_last_rank_was_there() -> None:
    bucket = Bucket(ranks=(0, 1), stage=0, bytes=1000)
    early = rank_of(0, step_of(9, 50.0, ("G", 0, 0, 0.1, 0.5), ("G", 0, 1, 0.2, 0.7), ("S", -1, -1, 0.4, 0.7)), buckets=(bucket, bucket))
    late = rank_of(1, step_of(9, 50.1, ("G", 0, 0, 0.2, 0.4), ("G", 0, 1, 0.3, 0.6), ("S", -1, -1, 0.3, 0.6)), buckets=(bucket, bucket))
    (sync,) = sync_seconds([early, late])
    assert sync.bytes == 2000
    assert sync.seconds == pytest.approx(0.2 + 0.2)  # from 50.3 to 50.5, then to 50.7
    assert sync.exposed_seconds == pytest.approx(0.1 + 0.2)  # from 50.4 on nobody computed
    assert sync_seconds([early]) == []  # half a group says nothing


def test_a_transfer_lasts_from_its_send_to_the_end_of_the_wait() -> None:
    sends = (Exchange(kind="send", ranks=(0, 1), calls=3, bytes=300_000),)
    sender = rank_of(0, step_of(4, 10.0, ("SF", 0, 2, 0.5, 0.51), ("SF", 0, 1, 0.1, 0.11)), exchanges=sends)
    receiver = rank_of(1, step_of(4, 10.1, ("RF", 1, 2, 0.0, 0.6), ("RF", 1, 1, 0.7, 0.70001)))  # the second had long arrived
    ((pair, (seconds, nbytes)),) = transfer_seconds([sender, receiver], pipeline()).items()
    assert (pair, nbytes) == ((0, 1), 100_000)
    assert seconds == pytest.approx(0.2)


def test_links_are_named_and_filled_as_the_cost_model_does(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CLUSTER)
    cluster = load_cluster(tmp_path / "c.toml")
    stage = Stage(start=0, stop=4, replicas=tuple(Replica(devices=(name,), samples=(2,)) for name in ("a/0", "a/1", "b/0", "b/1")))
    plan = Plan(graph="g", cluster="here", batch_size=8, micro_batch_size=2, stages=(stage,))
    reduced = Exchange(kind="all_reduce", ranks=(0, 1, 2, 3), calls=1, bytes=1000)
    sent = Exchange(kind="send", ranks=(1, 2), calls=1, bytes=70)
    near = Exchange(kind="send", ranks=(2, 3), calls=1, bytes=5)
    ranks = [rank_of(number, exchanges=(reduced, *((sent, near) if number == 1 else ()))) for number in range(4)]
    assert link_bytes(cluster, plan, ranks) == {"inside hosts": 2005.0, "oslo": 2070.0}  # counted once, whoever counted it
    assert link_bytes(None, plan, [rank_of(0, exchanges=(sent,))]) == {"a/1–b/0": 70.0}


def test_a_rate_is_learnt_from_what_was_exchanged(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CLUSTER)
    cluster = load_cluster(tmp_path / "c.toml")
    sends = (Exchange(kind="send", ranks=(0, 1), calls=1, bytes=100_000_000),)
    sender = rank_of(0, step_of(4, 10.0, ("SF", 0, 0, 0.5, 0.51)), exchanges=sends)
    receiver = rank_of(1, step_of(4, 10.0, ("RF", 1, 0, 0.0, 0.7)))
    links = measure_links(cluster, pipeline(), [sender, receiver])
    assert links.host_link_efficiency == pytest.approx(0.1 / 0.2 / 2.0)  # 0.5 GB/s over a link of 2 GB/s
    assert links.network_efficiency is None
    assert links.sync_overlap is None
    assert links.collective_seconds == 0.001


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    with process_group(tmp_path / "store", 0, 1):
        yield


@pytest.mark.usefixtures("one_rank")
def test_collectives_are_counted_also_from_inside_a_backward() -> None:
    value = torch.ones(10, requires_grad=True)
    value.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad) and None)  # type: ignore[no-untyped-call]
    with ExchangeCounter() as counter:
        (value * 2).sum().backward()  # type: ignore[no-untyped-call]
        dist.all_gather_single(torch.empty(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64))
    assert counter.exchanges() == (
        Exchange(kind="all_gather", ranks=(0,), calls=1, bytes=48),
        Exchange(kind="all_reduce", ranks=(0,), calls=1, bytes=40),
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("last", "expected"), [(1, 1), (5, 2)])
def test_the_second_step_is_counted_or_the_only_one(last: int, expected: int) -> None:
    recorder = Recorder(torch.device("cpu"))
    for step in range(1, last + 1):
        with counted(recorder, step, is_last=step == last):
            record(recorder, step)
            dist.all_reduce(torch.ones(4))
    assert recorder.counted_step == expected
    assert [exchange.bytes for exchange in recorder.exchanges] == [16]
