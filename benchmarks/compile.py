"""What `Job(compile=True)` gains: compiled against uncompiled steps of the same job, in turn in one process, and the seconds of compiling.

    python benchmarks/compile.py [--json] [--rounds 15] [--layers 4] [--threads 1]

Two roads are compared: the user's own code, as one process runs it, and the captured program layer by layer, as the stages of every
distributed mode run it. The model is a GPT with dropout, whose losses must agree to 1e-5. The ratio is the median over rounds of a compiled
step by an uncompiled one of the same round; beside it stands the ratio of processor time.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lockstep_models import Block, Shape, gpt_job
from report import print_json, print_table
from torch import Tensor, nn

from atoll import Job
from atoll.graph.capture import capture_program
from atoll.randomness import own_randomness
from atoll.runtime.executor import LossScale, Update, Updater, WorkItem
from atoll.runtime.modes.alone.trainer import AloneTrainer, training_alone
from atoll.runtime.stage.compilation import compiler_for
from atoll.runtime.whole_program import WholeProgram

TOLERANCE = 1e-5
CPU = torch.device("cpu")
_WARM_UP = 2


class DroppingBlock(Block):
    """A block whose result is dropped here and there, as most models have it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


def job_of(layers: int) -> Job:
    """The GPT of the lockstep benchmarks, with dropout."""
    job = gpt_job(Shape(layers=layers, width=256, heads=4), "gpt")
    build: Callable[[], Any] = job.model

    def with_dropout() -> nn.Module:
        model = build()
        for block in model.blocks:
            block.__class__ = DroppingBlock
        return model  # type: ignore[no-any-return]

    return dataclasses.replace(job, model=with_dropout)


class Written:
    """The user's own code, as `python train.py` runs it."""

    def __init__(self, job: Job) -> None:
        self._opened = training_alone(job, device=CPU, observers=[self._hear])
        self._trainer: AloneTrainer = self._opened.__enter__()
        self.compile_seconds, self.graph_breaks = 0.0, 0

    def _hear(self, event: Any) -> None:
        if event.kind == "compiled":
            self.compile_seconds, self.graph_breaks = self.compile_seconds + event.seconds, self.graph_breaks + event.graph_breaks

    def step(self, number: int) -> float:
        """The step of that number; its loss."""
        self._trainer.step()
        return self._trainer.losses[-1]


class Stages:
    """The captured program, layer by layer, in the executor of every mode."""

    def __init__(self, job: Job) -> None:
        self._job, model = job, job.build_model()
        parameters, optimizer = list(model.parameters()), job.build_model_optimizer(model)
        self._compiler = compiler_for(job, CPU)
        self._updater = Updater(parameters, optimizer, None, LossScale(False), steps=job.total_steps)
        self._program = WholeProgram(job, capture_program(job), model, CPU, self._updater, self._compiler)
        self.compile_seconds, self.graph_breaks = 0.0, 0

    def step(self, number: int) -> float:
        """The step of that number; its loss."""
        assert self._updater.optimizer is not None
        self._updater.optimizer.zero_grad()
        batch = self._job.samples.batch(number - 1)
        loss = self._program.train(WorkItem(0, number, 0, 0, self._job.batch_size), batch, None)
        self._updater.apply(Update(number))
        for event in self._compiler.take() if self._compiler is not None else ():
            if event.kind == "compiled":
                self.compile_seconds, self.graph_breaks = self.compile_seconds + event.seconds, self.graph_breaks + event.graph_breaks
        return float(loss.total)


def compare(road: str, make: Callable[[Job], Any], job: Job, rounds: int) -> dict[str, Any]:
    """Steps of both in turn; who begins changes from round to round."""
    runners = [make(job), make(dataclasses.replace(job, compile=True))]
    walls: list[list[float]] = [[], []]
    processors: list[list[float]] = [[], []]
    apart = 0.0
    for number in range(1, rounds + _WARM_UP + 1):
        losses = [0.0, 0.0]
        for index in (0, 1) if number % 2 else (1, 0):
            wall, processor = time.perf_counter(), time.process_time()
            losses[index] = runners[index].step(number)
            walls[index].append(time.perf_counter() - wall)
            processors[index].append(time.process_time() - processor)
        apart = max(apart, abs(losses[1] - losses[0]) / abs(losses[0]))
    plain, compiled = (times[_WARM_UP:] for times in walls)
    ratios = [mine / theirs for mine, theirs in zip(compiled, plain, strict=True)]
    processor = [mine / theirs for mine, theirs in zip(processors[1][_WARM_UP:], processors[0][_WARM_UP:], strict=True)]
    return {
        "road": road,
        "uncompiled_seconds": statistics.median(plain),
        "compiled_seconds": statistics.median(compiled),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "processor_ratio": statistics.median(processor),
        "compile_seconds": runners[1].compile_seconds,
        "graph_breaks": runners[1].graph_breaks,
        "losses_apart": apart,
        "losses_agree": apart <= TOLERANCE,
    }


def main(arguments: Sequence[str]) -> int:
    """Both roads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    job = job_of(options.layers)
    with own_randomness(0):
        lines = [compare(road, make, job, options.rounds) for road, make in (("as it is written", Written), ("captured stages", Stages))]
    if options.json:
        print_json({"tolerance": TOLERANCE, "layers": options.layers, "threads": options.threads, "lines": lines})
    else:
        header = ("road", "uncompiled ms", "compiled ms", "ratio", "from", "to", "processor", "compiling s", "breaks", "losses apart")
        rows = [
            (
                line["road"],
                1e3 * line["uncompiled_seconds"],
                1e3 * line["compiled_seconds"],
                round(line["ratio"], 3),
                min(line["ratios"]),
                max(line["ratios"]),
                round(line["processor_ratio"], 3),
                round(line["compile_seconds"], 1),
                line["graph_breaks"],
                f"{line['losses_apart']:.1e}",
            )
            for line in lines
        ]
        print_table(f"a compiled step by an uncompiled one, {options.layers} layers (losses must agree to {TOLERANCE:g})", header, rows)
    return 0 if all(line["losses_agree"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
