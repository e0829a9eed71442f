"""What a rank leaves in the run's directory about its time: its own file now and then, and at the end what all of them together say."""

import time
from contextlib import suppress

import msgspec
import torch

from atoll.cost import Cost
from atoll.graph import Graph
from atoll.runtime.modes.lockstep.calibration import calibrate
from atoll.runtime.modes.lockstep.measurement import executed_spans, read_measured, write_measured
from atoll.runtime.modes.lockstep.rank import RankWork
from atoll.runtime.modes.lockstep.schedule import Action
from atoll.runtime.modes.lockstep.trace import chrome_trace, predict, table
from atoll.runtime.peak import peak_memory_bytes
from atoll.runtime.run_directory import RunDirectory

__all__ = ["MeasuredFile", "action_seconds"]

_PLAN = "plan.txt"  # beside what ranks measured: the plan they measured it under
_FIRST_SECONDS, _MOST_SECONDS = 2.0, 30.0  # until the file is written anew; twice as long each time


def action_seconds(predicted: Cost, action: Action) -> float:
    """What an action was predicted to take, on its stage's slowest replica."""
    match action.kind:
        case "F":
            return predicted.stages[action.stage].forward_seconds
        case "B":
            return predicted.stages[action.stage].backward_seconds
        case "SF" | "SB":
            return predicted.stages[action.stage - (action.kind == "SB")].transfer_seconds
        case "G":
            return predicted.stages[action.stage].sync_seconds
        case "O":
            return predicted.breakdown.get("optimizer", 0.0)
        case _:
            return 0.0  # a receive lasts as long as its send


class MeasuredFile:
    """One rank's measurements on disk, a few seconds old at most when the rank is killed. A disk that is full ends no run."""

    def __init__(self, directory: RunDirectory, work: RankWork, device: torch.device) -> None:
        self.directory, self.work, self.device = directory, work, device
        self._pause, self._due = _FIRST_SECONDS, time.perf_counter() + _FIRST_SECONDS
        if work.rank == 0:
            with suppress(OSError):
                self._begin()

    def _begin(self) -> None:
        """Say what the schedule is; what was measured and predicted of another plan that the run had before is no longer true."""
        plan = str(self.work.layout.plan)
        before = self.directory.measured / _PLAN
        if not before.exists() or before.read_text(encoding="utf-8") != plan:
            for path in self.directory.measured.glob("rank-*.json"):
                path.unlink(missing_ok=True)
            self.directory.forget("trace.json", "predicted-trace.json")
            self.directory.write(f"measured/{_PLAN}", plan)
        grid = "".join(f"# {line}\n" for line in table(self.work.schedule).splitlines())
        self.directory.write("schedule.txt", f"{grid}\n{self.work.schedule}\n")
        if self.directory.predicted.exists():
            predicted = msgspec.json.decode(self.directory.predicted.read_bytes(), type=Cost)
            if len(predicted.stages) == len(self.work.layout.plan.stages):  # else it was made for a plan before this one
                spans = predict(self.work.schedule, lambda worker, action: action_seconds(predicted, action))
                self.directory.write("predicted-trace.json", msgspec.json.encode(chrome_trace(spans)))

    def after_step(self) -> None:
        """Write if it is time to."""
        if time.perf_counter() >= self._due:
            self.write()
            self._pause = min(2 * self._pause, _MOST_SECONDS)
            self._due = time.perf_counter() + self._pause

    def write(self) -> None:
        """Write now."""
        recorder = self.work.runner.recorder
        if not recorder.steps:
            return
        measured = recorder.measured(
            self.work.layout,
            self.work.rank,
            accelerator=self.device.type,
            threads=torch.get_num_threads(),
            buckets=self.work.runner.buckets,
            memory=peak_memory_bytes(self.device),
        )
        with suppress(OSError):
            write_measured(self.directory, measured)

    def conclude(self, graph: Graph) -> None:
        """Once all ranks have written: the executed trace, and the calibration that the next plan may begin with."""
        ranks = read_measured(self.directory)
        if len(ranks) < self.work.layout.world_size:  # no step was made, or a disk was full; the report says who is missing
            return
        names = {rank.rank: f"rank {rank.rank} {rank.device}" for rank in ranks}
        with suppress(OSError):
            self.directory.write("trace.json", msgspec.json.encode(chrome_trace(executed_spans(ranks), names)))
            cluster = self.directory.load_cluster()
            if cluster is not None and cluster.name == self.work.layout.plan.cluster:
                self.directory.write("calibration.json", calibrate(graph, cluster, self.work.layout.plan, ranks).to_json())
