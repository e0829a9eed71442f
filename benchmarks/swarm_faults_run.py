"""A swarm in a lab, its faults, and what came of it: the processes behind `swarm_faults.py`."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from safetensors.torch import load_file
from swarm_faults_setup import SITE_BYTES_PER_S, Setup, reference

from atoll.control.journal import Epoch, read_records
from atoll.control.messages import Committed
from atoll.lab import Lab
from atoll.lab.lab import LabProcess

__all__ = ["Measurements", "SwarmRun", "join_row", "judge", "weights_difference"]

ATOLL = (sys.executable, "-c", "from atoll.cli import main; main()")
JOIN = re.compile(r"atoll join (\S+) --token (\S+)")
LOOK_SECONDS = 0.05
END_SECONDS = 600.0
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Worker:
    """A worker process as the benchmark knows it."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.started = time.monotonic()
        self.joined: float | None = None
        self.ended: float | None = None
        self.away: list[tuple[float, float]] = []  # stopped or cut off
        self.log = ""

    def live_seconds(self, start: float, stop: float) -> float:
        """Between two moments."""
        if self.joined is None:
            return 0.0
        first, last = max(start, self.joined), min(stop, self.ended if self.ended is not None else stop)
        away = sum(max(0.0, min(last, until) - max(first, since)) for since, until in self.away)
        return max(0.0, last - first - away)


class SwarmRun:
    """`with SwarmRun(setup) as run:` starts it; leaving the block ends whatever is left."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.directory = setup.folder / "run"
        self.commits: list[tuple[float, int]] = []  # when, step
        self.faults: list[tuple[float, str]] = []
        self.faults_from = float("inf")
        self.workers: dict[str, Worker] = {}
        self._read = 0
        self._joins = 0
        self._joining: dict[str, LabProcess] = {}

    def __enter__(self) -> Self:
        setup = self.setup
        self.lab = Lab(setup.cluster, impose_speeds=True, namespaces=True)
        self.log = setup.folder / "run.log"
        command = [*ATOLL, "run", str(setup.script), "--plan", str(setup.plan), "--mode", "swarm", "--out", str(self.directory)]
        command += ["--checkpoint-every", "10", "--listen", f"{self.lab.address(setup.head)}:7000", "--", *setup.arguments]
        with self.log.open("wb") as out:
            self.process = self.lab.start(setup.head, command, environ=THREADS, stdout=out, stderr=out)
        for number, host in enumerate(setup.hosts):
            self.workers[f"worker-{number}"] = Worker(f"worker-{number}", host)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.lab.close()

    # ---- time

    @staticmethod
    def now() -> float:
        """Seconds."""
        return time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.process.returncode is not None

    def follow(self, seconds: float) -> None:
        """Looks at events for so long, or until the run is over."""
        until = self.now() + seconds
        while self.now() < until and not self.over:
            self.look()
            time.sleep(LOOK_SECONDS)

    def wait_for_steps(self, count: int) -> None:
        """Until so many steps are committed."""
        while len(self.commits) < count:
            if self.over:
                raise SystemExit(f"the run ended early:\n{self.log.read_text()[-4000:]}")
            self.follow(LOOK_SECONDS)

    def wait_for_end(self) -> None:
        """Training ends by itself; if it does not, that is said."""
        until = self.now() + END_SECONDS
        while not self.over and self.now() < until:
            self.follow(0.5)
        self.look()

    def look(self) -> None:
        """Reads what the run has written since."""
        path, now = self.directory / "events.jsonl", self.now()
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read += whole
        for line in data[:whole].splitlines():
            self._take(json.loads(line), now)

    def _take(self, event: dict[str, Any], now: float) -> None:
        if event["event"] == "step_finished":
            self.commits.append((now, event["step"]))
        elif event["event"] == "member_changed" and event["state"] == "active" and event["name"] in self.workers:
            worker = self.workers[event["name"]]
            worker.joined = worker.joined or now

    # ---- faults

    def live_workers(self) -> list[Worker]:
        """Joined, not killed, not away."""
        now = self.now()
        return [
            worker
            for worker in self.workers.values()
            if worker.joined is not None and worker.ended is None and not any(since <= now < until for since, until in worker.away)
        ]

    def _fault(self, what: str) -> None:
        self.faults.append((self.now(), what))
        print(f"{len(self.commits)} of {self.setup.steps} steps: {what}", file=sys.stderr, flush=True)

    def _signal(self, host: str, number: int) -> None:
        for pid in self.lab.world.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def replace(self, worker: Worker) -> None:
        """Kills a worker; another joins on its host."""
        self._signal(worker.host, signal.SIGKILL)
        worker.ended = self.now()
        self._fault(f"kill {worker.name}")
        self.join(worker.host)

    def join(self, host: str) -> Worker:
        """`atoll join` on a host."""
        found = JOIN.search(self.log.read_text())
        assert found is not None
        self._joins += 1
        worker = Worker(f"joined-{self._joins}", host)
        command = [*ATOLL, "join", found[1], "--token", found[2], "--name", worker.name]
        log = self.setup.folder / f"{worker.name}.log"
        with log.open("wb") as out:
            self._joining[worker.name] = self.lab.start(host, command, environ=THREADS, stdout=out, stderr=out)
        self.workers[worker.name] = worker
        return worker

    def leave(self, worker: Worker) -> None:
        """Ctrl-C on a machine that joined, and its end."""
        self._signal(worker.host, signal.SIGINT)
        process = self._joining[worker.name]
        until = self.now() + END_SECONDS
        while process.returncode is None and self.now() < until:
            self.follow(0.2)
        worker.ended = self.now()

    def stop(self, worker: Worker, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        now = self.now()
        worker.away.append((now, now + seconds))
        self._signal(worker.host, signal.SIGSTOP)
        self._fault(f"stop {worker.name} for {seconds:g} s")
        threading.Timer(seconds, self._signal, (worker.host, signal.SIGCONT)).start()

    def cut(self, seconds: float) -> None:
        """The sites from each other. Those away from the coordinator count as away."""
        now = self.now()
        for worker in self.live_workers():
            if worker.host.startswith("rome"):
                worker.away.append((now, now + seconds))
        self.lab.cut(("oslo", "rome"), duration_seconds=seconds)
        self._fault(f"cut oslo–rome for {seconds:g} s")

    def kill_coordinator(self) -> None:
        """SIGKILL."""
        for pid in self.lab.world.processes(self.setup.head):
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2:4] == [b"atoll.cli.swarm_process", b"coordinator"]:
                    os.kill(pid, signal.SIGKILL)
        self._fault("kill the coordinator")

    # ---- afterwards

    def weights(self) -> dict[str, Any]:
        """As `atoll export` gives them."""
        target = self.setup.folder / "weights.safetensors"
        subprocess.run([*ATOLL, "export", str(self.directory), "--to", str(target)], check=True, capture_output=True)
        return load_file(target)


class Measurements(msgspec.Struct, kw_only=True):
    """What came of it."""

    ended_by_itself: bool
    steps: int
    planned_steps: int
    weights_difference: float  # largest, of the largest weight
    loss_difference: float
    steps_wrong: int  # with samples lost or doubled, missing, or committed twice
    stages_lost: int
    fault_free_rate: float  # micro-batches a second and live worker
    faulty_rate: float
    step_seconds: float
    faults: list[tuple[float, str, float | None]]
    joins: list[dict[str, Any]]

    @property
    def share(self) -> float:
        """Of the fault-free rate."""
        return self.faulty_rate / self.fault_free_rate if self.fault_free_rate else 0.0

    @property
    def met(self) -> bool:
        """Whether all that is asked for holds."""
        exact = self.weights_difference <= 1e-4 and self.steps_wrong == 0 and self.stages_lost == 0
        return self.ended_by_itself and self.steps == self.planned_steps and exact and self.share >= 0.8

    def rows(self) -> list[tuple[str, object, str]]:
        """For a table."""
        return [
            ("training ended by itself", "yes" if self.ended_by_itself else "no", "yes"),
            ("steps committed", self.steps, str(self.planned_steps)),
            ("weights, largest difference from plain PyTorch", self.weights_difference, "1e-4"),
            ("losses, largest difference", self.loss_difference, ""),
            ("steps with samples lost or doubled", self.steps_wrong, "0"),
            ("steps lost (a stage went back to its checkpoint)", self.stages_lost, "0"),
            ("step without faults, s", self.step_seconds, ""),
            ("micro-batches a second and live worker, without faults", self.fault_free_rate, ""),
            ("the same with faults", self.faulty_rate, ""),
            ("share", self.share, "0.8"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**msgspec.to_builtins(self), "share": self.share, "met": self.met}


def judge(run: SwarmRun) -> Measurements:
    """Compares with the reference."""
    code = run.process.returncode
    losses, weights, expected = reference(run.setup)
    commits = _lineage(run.directory / "journal.jsonl")
    wrong = sum(
        1 for step, weight in enumerate(weights) if step not in commits or abs(commits[step].weight - weight) > 1e-5 * weight
    ) + _twice(run.directory / "journal.jsonl")
    apart = max((abs(one.loss / one.weight - losses[step]) / losses[step] for step, one in commits.items()), default=float("inf"))
    last = run.commits[-1][0] if run.commits else run.now()
    return Measurements(
        ended_by_itself=code == 0,
        steps=len(commits),
        planned_steps=run.setup.steps,
        weights_difference=weights_difference(run, expected) if code == 0 else float("inf"),
        loss_difference=apart,
        steps_wrong=wrong,
        stages_lost=sum(isinstance(record, Epoch) and record.epoch > 0 for record in _records(run.directory / "journal.jsonl")),
        fault_free_rate=_rate(run, run.commits[0][0], min(run.faults_from, last)),
        faulty_rate=_rate(run, run.faults_from, last),
        step_seconds=_median_step(run),
        faults=_recoveries(run),
        joins=[row for worker in run.workers.values() if (row := join_row(run, worker, SITE_BYTES_PER_S)) is not None],
    )


def _records(path: Path) -> list[Any]:
    return list(read_records(path.read_bytes())[0])


def _lineage(path: Path) -> dict[int, Committed]:
    """The commits that made the weights: those after a return to a checkpoint count."""
    found: dict[int, Committed] = {}
    for record in _records(path):
        if isinstance(record, Epoch):
            found = {version: commit for version, commit in found.items() if version < record.version}
        elif isinstance(record, Committed):
            found[record.version] = record
    return found


def _twice(path: Path) -> int:
    """Steps committed more than once in an epoch."""
    seen = [(record.epoch, record.version) for record in _records(path) if isinstance(record, Committed)]
    return len(seen) - len(set(seen))


def weights_difference(run: SwarmRun, expected: dict[str, Any]) -> float:
    """The largest, of the largest weight."""
    found = run.weights()
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / largest


def _rate(run: SwarmRun, start: float, stop: float) -> float:
    """Micro-batches committed a second and live worker."""
    steps = sum(start < at <= stop for at, _ in run.commits)
    live = sum(worker.live_seconds(start, stop) for worker in run.workers.values())
    return steps * run.setup.micro_batches / live if live else 0.0


def _median_step(run: SwarmRun) -> float:
    before = [at for at, _ in run.commits if at <= run.faults_from]
    return statistics.median(after - at for at, after in pairwise(before)) if len(before) > 1 else 0.0


def _recoveries(run: SwarmRun) -> list[tuple[float, str, float | None]]:
    begin = run.commits[0][0]
    return [(at - begin, what, next((commit - at for commit, _ in run.commits if commit > at), None)) for at, what in run.faults]


def join_row(run: SwarmRun, worker: Worker, bytes_per_s: float) -> dict[str, Any] | None:
    """From the account the worker gave the coordinator; None for those of the beginning and those that had no time."""
    members = json.loads((run.directory / "measured" / "swarm.json").read_text())
    account = members.get(worker.name)
    if not worker.name.startswith("joined") or account is None or account["work_seconds"] is None:
        return None
    copy = account["state_bytes"] / bytes_per_s
    return {
        "worker": worker.name,
        "joined_s": (worker.joined or 0.0) - worker.started,
        "state_mb": account["state_bytes"] / 1e6,
        "copy_s": copy,
        "state_s": account["state_seconds"],
        "work_s": account["work_seconds"],
        "times_copy": account["work_seconds"] / copy,
    }
