"""A site whose rank is killed costs the other one nothing, and comes back; so does the coordinator."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from . import island_job
from .test_islands import ATOLL, cluster

pytestmark = pytest.mark.timeout(150)
STEPS = island_job.STEPS


def events_of(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def rounds_of(run: Path) -> list[dict[str, int]]:
    """Of every round: how many steps it has of each site."""
    found = [event for event in events_of(run / "events.jsonl") if event["event"] == "round_finished"]
    return [{site["site"]: site["steps"] for site in event["sites"]} for event in found]


def kill(run: "subprocess.Popen[str]", name: str) -> None:
    killed = 0
    for child in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if name == child.name():
                child.send_signal(signal.SIGKILL)
                killed += 1
    assert killed == 1


def test_a_killed_site_comes_back_and_the_other_loses_no_step(tmp_path: Path) -> None:
    """Steps are let happen one by one, by a file that both sites' data waits for."""
    run, log, allowed = tmp_path / "run", tmp_path / "log", tmp_path / "allowed"
    allowed.write_text("2")
    options = ["--inner-steps", "1", "--delay-steps", "0", "--outer-codec", "int8", "--max-restarts", "1", "--quorum", "1"]
    command = [*ATOLL, "run", island_job.__file__, "-c", str(cluster(tmp_path / "c.toml", (1, 1))), "--mode", "islands", *options]
    with (
        log.open("w") as out,
        subprocess.Popen([*command, "--out", str(run), "--", "sgd", str(allowed)], stdout=out, stderr=out) as started,
    ):
        try:

            def until(condition: Callable[[], bool]) -> None:
                while not condition():
                    assert started.poll() is None, f"the run ended early:\n{log.read_text()}"
                    time.sleep(0.05)

            until(lambda: len(rounds_of(run)) == 2)
            kill(started, "rome rank 0")
            allowed.write_text("4")
            until(lambda: len(rounds_of(run)) >= 4)
            kill(started, "coordinator")
            for step in range(5, STEPS + 1):
                allowed.write_text(str(step))
                until(lambda step=step: sum(made.get("oslo", 0) for made in rounds_of(run)) >= step)  # type: ignore[misc]
                if step == STEPS - 3:  # oslo waits for its data; rome makes what it missed, up to here
                    until(lambda: sum(made.get("rome", 0) for made in rounds_of(run)) > 2)
            assert started.wait() == 0, log.read_text()
        finally:
            if started.poll() is None:
                started.kill()
    rounds = rounds_of(run)
    assert sum(made.get("oslo", 0) for made in rounds) == STEPS
    assert {"oslo": 1, "rome": 1} in rounds[:2]
    assert any("rome" in made for made in rounds[4:])
    ended = [event["state"] for event in events_of(run / "events.jsonl") if event["event"] == "member_changed" and event["name"] == "rome"]
    assert ended[:1] == ["active"]
    assert "dead" in ended
    steps = [event["step"] for event in events_of(run / "sites" / "oslo" / "events.jsonl") if event["event"] == "step_finished"]
    assert steps == list(range(1, STEPS + 1))  # none was made again
