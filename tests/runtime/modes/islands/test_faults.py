"""A site whose rank is killed costs the other one nothing, and comes back; so does the coordinator; Ctrl-C leaves a run that goes on."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from . import island_job
from .test_islands import ATOLL, EVERY_STEP, check_equal, cluster, one_process, run_job

pytestmark = pytest.mark.timeout(300)
STEPS = island_job.STEPS


def events_of(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def rounds_of(run: Path) -> list[dict[str, int]]:
    """Of every round: how many steps it has of each site."""
    found = [event for event in events_of(run / "events.jsonl") if event["event"] == "round_finished"]
    return [{site["site"]: site["steps"] for site in event["sites"]} for event in found]


def notes_of(site: Path) -> list[str]:
    return [event["message"] for event in events_of(site / "events.jsonl") if event["event"] == "note"]


def kill(run: "subprocess.Popen[str]", name: str) -> None:
    killed = 0
    for child in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if name == child.name():
                child.send_signal(signal.SIGKILL)
                killed += 1
    assert killed == 1


@contextmanager
def started(
    tmp_path: Path, steps: str, *options: str, sites: Path | None = None
) -> Iterator[tuple["subprocess.Popen[str]", Callable[[Callable[[], bool]], None]]]:
    """A run of two sites, of so many steps or as a file lets happen, and a wait for something in it. Nothing is left of it."""
    log, sites = tmp_path / "log", sites or cluster(tmp_path / "c.toml", (1, 1))
    command = [*ATOLL, "run", island_job.__file__, "-c", str(sites), "--mode", "islands", *options]
    command += ["--out", str(tmp_path / "run"), "--", "sgd", steps]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, text=True) as process:

        def until(condition: Callable[[], bool]) -> None:
            while not condition():
                assert process.poll() is None, f"the run ended early:\n{log.read_text()}"
                time.sleep(0.05)

        try:
            yield process, until
        finally:
            if process.poll() is None:
                process.kill()


def test_a_killed_site_comes_back_and_the_other_loses_no_step(tmp_path: Path) -> None:
    run, allowed = tmp_path / "run", tmp_path / "allowed"
    allowed.write_text("2")
    options = ["--inner-steps", "1", "--delay-steps", "0", "--outer-codec", "int8", "--max-restarts", "1", "--quorum", "1", "--equal-steps"]
    with started(tmp_path, str(allowed), *options) as (process, until):
        until(lambda: len(rounds_of(run)) == 2)
        kill(process, "rome rank 0")
        allowed.write_text("4")
        until(lambda: len(rounds_of(run)) >= 4)
        kill(process, "coordinator")
        for step in range(5, STEPS + 1):
            allowed.write_text(str(step))
            until(lambda step=step: sum(made.get("oslo", 0) for made in rounds_of(run)) >= step)  # type: ignore[misc]
            if step == STEPS - 3:  # oslo waits for its data until rome is there again; from then on they wait for each other
                until(lambda: any("goes on after 2 of its steps" in said for said in notes_of(run / "sites" / "rome")))
        assert process.wait() == 0, (tmp_path / "log").read_text()
    rounds = rounds_of(run)
    assert sum(made.get("oslo", 0) for made in rounds) == STEPS
    assert any("rome" in made for made in rounds[:2])  # on a busy machine it may be late for the first
    assert any("rome" in made for made in rounds[4:])
    states = [event["state"] for event in events_of(run / "events.jsonl") if event["event"] == "member_changed" and event["name"] == "rome"]
    assert states[:1] == ["active"]
    assert "dead" in states
    steps = [event["step"] for event in events_of(run / "sites" / "oslo" / "events.jsonl") if event["event"] == "step_finished"]
    assert steps == list(range(1, STEPS + 1))  # none was made again


def test_a_run_that_was_asked_to_stop_goes_on(tmp_path: Path) -> None:
    """With more steps than it can make before it hears of it."""
    run = tmp_path / "run"
    with started(tmp_path, "400", "--equal-steps", *EVERY_STEP) as (process, until):
        until(lambda: len(rounds_of(run)) >= 4)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130, (tmp_path / "log").read_text()
    assert f"--resume {run}" in (tmp_path / "log").read_text()
    steps = len(rounds_of(run)) + 4
    run_job(["--resume", str(run), "--mode", "islands", "--equal-steps", *EVERY_STEP], "sgd", steps)
    check_equal(run, "sgd", *one_process(steps))
