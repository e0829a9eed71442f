"""The report of a swarm: who came and went, what stages and links did, from events and the workers' own accounts."""

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from atoll.cli.report import report_view, section_view
from atoll.events import (
    AnyEvent,
    CoordinatorStarted,
    EventLog,
    MemberChanged,
    MemberMoved,
    MemberState,
    ProcessEnded,
    RunFinished,
    RunStarted,
    StageLost,
    StepFinished,
    StepRepaired,
)
from atoll.plan import parse_plan
from atoll.runtime.modes.swarm.report import MEMBERS, KernelTimes, Measured, SwarmReport, tell_swarm
from atoll.runtime.modes.swarm.report_view import swarm_section
from atoll.runtime.report import Compared, figures
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.watch.report import RunReport, read_report

PLAN = """plan v1 graph=g cluster=c mode=swarm schedule=1f1b batch=12 micro_batch=3
stage 0: layers 0-1: h/0=12
stage 1: layers 2-4: h/1=12
"""


def step(number: int, at: float, seconds: float) -> StepFinished:
    return StepFinished(at_seconds=at, step=number, loss=1.0 / number, samples=12, weight=12.0, seconds=seconds, learning_rate=None)


def member(at: float, name: str, stage: int, state: MemberState, before: MemberState = "active") -> MemberChanged:
    return MemberChanged(at_seconds=at, name=name, state=state, before=before, stages=(stage,) if stage >= 0 else ())


EVENTS: list[AnyEvent] = [
    RunStarted(
        at_seconds=0.0, name="g", mode="swarm", steps=3, batch_size=12, samples=96, parameters=9, devices=(), precision="fp32", seed=0,
        unix_seconds=1.0,
    ),
    CoordinatorStarted(at_seconds=0.1, term=1, step=0),
    member(1.0, "anna", 0, "active", "joining"),
    member(1.1, "feeder", -1, "active", "joining"),
    member(1.2, "bert", 1, "active", "joining"),
    step(1, 5.0, 4.0),
    member(5.5, "cleo", 1, "active", "joining"),
    member(6.0, "bert", 1, "silent"),
    StepRepaired(at_seconds=6.1, step=2, micro_batches=(0, 2), reason="somebody who had it is gone"),
    step(2, 7.0, 2.0),
    member(7.5, "bert", 1, "active", "silent"),
    MemberMoved(at_seconds=7.6, name="bert", source=1, target=0, reason="it helps"),
    StageLost(at_seconds=8.0, stage=0, step=2),
    CoordinatorStarted(at_seconds=8.5, term=2, step=2),
    step(3, 9.0, 2.0),
    member(9.5, "anna", 0, "left"),
    RunFinished(at_seconds=10.0, reason="done", steps=3, samples=36, seconds=10.0, loss=0.3),
    ProcessEnded(at_seconds=10.1, name="coordinator", role="coordinator", how="exit code 0", exit_code=0, then="done"),
]  # fmt: skip
ACCOUNTS = {
    "anna": Measured(
        kernels={0: KernelTimes(12, 1.2, 12, 2.4)},
        received_bytes={"bert": 500, "anna": 1},
        received_bytes_per_s={"bert": 50.0},
        state_bytes=64,
    ),
    "bert": Measured(kernels={1: KernelTimes(turns=9, turn_seconds=2.7), 0: KernelTimes(1, 0.1, 1, 0.2)}, received_bytes={"anna": 900}),
    "cleo": Measured(kernels={1: KernelTimes(turns=5, turn_seconds=1.5)}, state_bytes=64, state_seconds=0.5, work_seconds=0.75),
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create(RunSettings(script="train.py", mode="swarm"))
    directory.write_plan(parse_plan(PLAN))
    with EventLog(directory.path) as log:
        for event in EVENTS:
            log(event)
    return directory


def text_of(report: RunReport) -> str:
    out = StringIO()
    Console(file=out, width=160).print(report_view(report))
    return out.getvalue()


def test_a_swarm_is_told_from_its_events_and_accounts(run: RunDirectory) -> None:
    run.write(MEMBERS, msgspec.json.encode(ACCOUNTS))
    report = read_report(run.path)
    found = report.facts["swarm"]
    assert found is not None
    assert found.steps_per_second == 0.5
    assert (found.joined, found.left, found.silent, found.returned, found.moved) == (4, 1, 1, 1, 1)
    assert (found.coordinators, found.stages_lost, found.steps_repaired, found.asked_again) == (2, 1, 1, [0, 2])
    assert found.computed_again == pytest.approx(1 - 3 * 4 * 2 / 27)
    first, last = found.stages
    assert (first.workers, first.micro_batches, first.micro_batches_per_second) == (2, 13, 2.0)
    assert first.forward_seconds.measured == pytest.approx(0.1)
    assert first.backward_seconds.measured == pytest.approx(0.2)
    assert last.forward_seconds.measured is None
    assert last.backward_seconds.measured == pytest.approx(0.3)
    assert [(member.name, member.stages, member.ending) for member in found.members] == [
        ("anna", [0], "left"),
        ("bert", [1, 0], "stayed"),
        ("cleo", [1], "stayed"),
    ]
    assert [(link.source, link.target, link.bytes) for link in found.links] == [("bert", "anna", 500), ("anna", "bert", 900)]
    assert msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(report.to_json())["swarm"]), type=SwarmReport) == found
    shown = text_of(report)
    for words in (
        "a step every 2 s on average after the first: 0.5 steps/s of 4 micro-batches",
        "1 step repaired: 2 micro-batches of a stage",
        "4 joined",
        "2 coordinators",
        "asked for again",
        "anna → bert",
        "left 0:10",
        "0.8 s",
    ):
        assert words in shown


def test_the_tables_of_a_terminal_of_80_columns_wrap_no_words() -> None:
    long = [
        EVENTS[0],
        member(0.5, "worker-0-r1", 0, "active", "joining"),
        member(63.0, "worker-12-r1-2", 1, "active", "joining"),
        MemberMoved(at_seconds=70.0, name="worker-12-r1-2", source=1, target=0, reason="it helps"),
        *(step(number, 100.0 * number, 100.0) for number in range(1, 4)),
        member(1800.4, "worker-12-r1-2", 0, "silent"),
    ]
    account = Measured(
        kernels={0: KernelTimes(22_500, 2_500.0, 22_500, 4_900.0), 1: KernelTimes(turns=123_456, turn_seconds=12_345.6)},
        state_bytes=123_400_000,
        state_seconds=12.34,
        work_seconds=123.4,
    )
    found = tell_swarm(long, dict.fromkeys(("worker-0-r1", "worker-12-r1-2"), account), 4, 2, None)
    worst = Compared(measured=0.1111, predicted=0.001)
    stages = [msgspec.structs.replace(stage, forward_seconds=worst, backward_seconds=worst) for stage in found.stages]
    out = StringIO()
    Console(file=out, width=80).print(*section_view(swarm_section(msgspec.structs.replace(found, stages=stages))), sep="\n")
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["stage", "workers", "done", "per", "s", "measured", "predicted"] in lines
    assert ["0", "2", "45,000", "0.04", "forward", "111", "ms", "1", "ms", "over", "100", "times"] in lines
    assert ["stage", "came", "end", "done", "state", "in", "work", "in"] in lines
    assert ["worker-0-r1", "0", "0:00", "works", "145,956", "123", "MB", "12.3", "s", "123.4", "s"] in lines
    assert ["worker-12-r1-2", "1→0", "1:03", "silent", "30:00", "145,956", "123", "MB", "12.3", "s", "123.4", "s"] in lines


def test_repeated_steps_are_part_of_what_was_computed_again(run: RunDirectory) -> None:
    finished = EVENTS[-2]
    again = [*EVENTS[:-2], step(2, 9.6, 1.0), step(3, 9.7, 1.0), finished]
    whole = {
        "anna": Measured(kernels={0: KernelTimes(0, 0.0, 20, 2.0)}),
        "cleo": Measured(kernels={1: KernelTimes(turns=21, turn_seconds=2.0)}),
    }
    found = tell_swarm(again, whole, 4, 2, None)
    assert (found.steps_repeated, found.again, found.again_at_least) == (2, 17, True)  # bert was not heard for a while
    assert found.computed_again == pytest.approx(17 / 41)
    part = tell_swarm(again, ACCOUNTS, 4, 2, None)  # says of 3 only
    assert (part.again, part.computed_again) == (16, pytest.approx(16 / 40))
    heard = [event for event in again if not (isinstance(event, MemberChanged) and "silent" in (event.state, event.before))]
    assert not tell_swarm(heard, whole, 4, 2, None).again_at_least
    assert tell_swarm(heard[:-1], whole, 4, 2, None).again_at_least  # they work on, or nobody has told that they do not


@pytest.mark.parametrize(
    ("turns", "events", "said"),
    [
        (12, EVENTS, "nothing is known to have been computed again; the last seconds of workers"),
        (11, EVENTS, "nothing is known to have been computed again; the last seconds of workers"),
        (15, EVENTS, "at least 11.1% of what was computed was computed again: 3 micro-batches of a stage\n"),
        (
            12,
            [event for event in EVENTS if not (isinstance(event, MemberChanged) and event.state == "silent")],
            "nothing was computed again\n",
        ),
        (
            20,
            [*EVENTS[:-2], step(3, 9.6, 1.0), EVENTS[-2]],
            "at least 25.0% of what was computed was computed again: 8 micro-batches of a stage, those of 1 repeated step among them\n",
        ),
    ],
)
def test_what_was_computed_again_is_one_statement(turns: int, events: list[AnyEvent], said: str) -> None:
    accounts = {"anna": Measured(kernels={0: KernelTimes(0, 0.0, 12, 1.0)}), "cleo": Measured(kernels={1: KernelTimes(turns=turns)})}
    out = StringIO()
    Console(file=out, width=160).print(*section_view(swarm_section(tell_swarm(events, accounts, 4, 2, None))), sep="\n")
    assert said in out.getvalue()


def test_without_accounts_the_events_are_told(run: RunDirectory) -> None:
    found = read_report(run.path).facts["swarm"]
    assert found is not None
    assert found.links == []
    assert found.computed_again is None
    assert [member.micro_batches for member in found.members] == [0, 0, 0]
    assert "4 joined" in text_of(read_report(run.path))


def test_links_are_the_slowest_few_and_the_others_are_counted(run: RunDirectory) -> None:
    rates = {f"peer-{number:02}": 1e6 * (40 - number) for number in range(40)}
    account = Measured(received_bytes=dict.fromkeys([*rates, "feeder"], 1000), received_bytes_per_s=rates)
    run.write(MEMBERS, msgspec.json.encode({"anna": account}))
    report = read_report(run.path)
    assert [link.source for link in report.facts["swarm"].links[:2]] == ["peer-39", "peer-38"]
    assert len(report.facts["swarm"].links) + report.facts["swarm"].more_links == 41
    shown = text_of(report)
    assert "peer-34 → anna" in shown
    assert "peer-33 → anna" not in shown
    assert "… and 35 more" in shown


def test_the_first_step_of_every_start_is_not_in_the_rate() -> None:
    again = [EVENTS[0], step(4, 40.0, 30.0), step(5, 42.0, 2.0)]
    assert tell_swarm([*EVENTS, *again], {}, 4, 2, None).steps_per_second == 0.5
    assert tell_swarm([EVENTS[0], step(1, 5.0, 5.0)], {}, 4, 2, None).steps_per_second is None


@pytest.mark.parametrize(
    ("measured", "said"),
    [(1.21, "+21%"), (0.66, "-34%"), (1.99, "+99%"), (3.31, "3.3 times"), (33.4, "33 times"), (332.35, "over 100 times")],
)
def test_how_far_apart_is_told_so_that_it_can_be_read(measured: float, said: str) -> None:
    assert figures(Compared(measured=measured, predicted=1.0))[2] == said
    assert figures(Compared(measured=measured, predicted=0.0))[2] == ""


def test_a_process_that_hosts_several_stages_joined_once(run: RunDirectory) -> None:
    with EventLog(run.path, resume=True) as log:
        log(member(11.0, "dora", 0, "active", "joining"))
        log(member(11.0, "dora+1", 1, "active", "joining"))
    found = read_report(run.path).facts["swarm"]
    assert found is not None
    assert found.joined == 5
    assert [(member.name, member.ending) for member in found.members][-2:] == [("dora", "works"), ("dora+1", "works")]


def test_a_run_whose_events_are_gone_says_so_and_nothing_untrue(run: RunDirectory) -> None:
    run.write(MEMBERS, msgspec.json.encode(ACCOUNTS))
    run.events.unlink()
    report = read_report(run.path)
    assert (report.mode, report.steps, report.facts["swarm"].computed_again) == ("swarm", 0, None)
    assert [line for line in report.missing if line.startswith("events.jsonl: it is not there")]
