"""Hugging Face architectures as they are, trained in one process and under plans: equal, refused with a sentence, or silently different.

    python benchmarks/zoo.py [--only NAME …] [--task TASK …] [--limit N] [--keep ROWS] [--json] [--write docs/zoo.md]

One process is a plain PyTorch loop over whole batches, `model(**batch).loss`, with dropout, SpecAugment, layer drop and auxiliary losses as
the configurations have them. Against it: a pipeline of three stages, two replicas with 11 and 5 samples, a swarm's two stages, two ranks
that divide tensors and two that divide experts. What cannot be captured is trained as it is, by two ranks with 11 and 5 samples. Losses of
every step and all weights after the last are compared, with SGD with momentum and with AdamW. Limit: nothing differs by more than 1e-5
without being refused. A larger difference is computed in double precision too, where rounding that a model makes much of (batch
normalisation of a few values, a kink) is smaller, and an error as large as before.
"""

import argparse
import dataclasses
import json
import logging
import math
import sys
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from report import machine, print_table
from torch import Tensor
from zoo_models import Architecture, architectures, share
from zoo_reference import Pieces, Trained, train, train_in_pieces
from zoo_ways import InOneProcess, check_pieces_fit, even_bounds, in_two_ranks

from atoll import Job
from atoll.errors import AtollError
from atoll.graph.capture import Captured
from atoll.graph.eager import Uncaptured, capture_or_run

BATCH, STEPS, SEED, TOLERANCE = 16, 2, 3, 1e-5
QUARTERS: Pieces = [(start, start + 4) for start in range(0, BATCH, 4)]
UNEQUAL: Pieces = [(0, 11), (11, BATCH)]
WAYS = ("pipeline", "data 11:5", "swarm", "tensor", "expert")


def optimizers_of(architecture: Architecture) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """Adam divides a gradient by its own size: where the true gradient is zero (biases of attention keys) that would be rounding noise."""
    return {
        "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "AdamW": partial(torch.optim.AdamW, lr=1e-3, eps=architecture.epsilon),
    }


class Outcome(msgspec.Struct, frozen=True):
    """What came of one way of computing an architecture."""

    kind: str  # "equal", "refused", "different", "failed", "none": there is nothing to divide
    difference: float = 0.0
    sentence: str = ""
    eager: bool = False  # it was trained as it is, not captured
    single: float | None = None  # what the difference is in single precision, where it was computed in double precision too


class Row(msgspec.Struct, frozen=True):
    """An architecture with what came of it."""

    name: str
    task: str
    ways: dict[str, Outcome]
    seconds: float


class Rows:
    """A batch as data: one sample a row."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.batch.items()}


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """As in every tutorial."""
    loss: Tensor = model(**batch).loss
    return loss


def jobs_of(architecture: Architecture) -> dict[str, Job]:
    """One for each optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        data = Rows(architecture.batch(BATCH * STEPS))
    return {
        name: Job(
            name=architecture.name,
            model=architecture.build,
            loss=own_loss,
            data=data,
            batch_size=BATCH,
            steps=STEPS,
            optimizer=optimizer,
            seed=SEED,
        )
        for name, optimizer in optimizers_of(architecture).items()
    }


class Trial:
    """One architecture, captured once."""

    def __init__(self, architecture: Architecture, jobs: dict[str, Job], captured: Captured) -> None:
        self.architecture, self.jobs, self.captured = architecture, jobs, captured
        self.job = next(iter(jobs.values()))
        self.batches = [self.job.samples.batch(step) for step in range(STEPS)]
        self._references: dict[tuple[str, bool], Trained] = {}

    def reference(self, optimizer: str, pieces: Pieces) -> Trained:
        """Of one process; computed anew for other pieces only where they matter."""
        plain = self._references.get((optimizer, True))
        if plain is not None and not plain.depends_on_pieces:
            return plain
        key = optimizer, pieces is QUARTERS
        if key not in self._references:
            if self.architecture.by_pieces:
                self._references[key] = reference_in_pieces(self.architecture, self.jobs[optimizer], pieces)
            else:
                job = self.jobs[optimizer]
                self._references[key] = train(job.build_model(), own_loss, self.batches, pieces, job.optimizer, SEED)
        return self._references[key]

    def in_one_process(self, stages: int, pieces: Pieces, *, contributed: bool = False) -> Outcome:
        """Both optimizers, one after another."""
        check_pieces_fit(self.captured, pieces)
        bounds, worst = even_bounds(self.captured, stages), Outcome("equal")
        for optimizer in self.jobs:
            run = InOneProcess(self.jobs[optimizer], self.captured, bounds, contributed=contributed)
            worst = worse(worst, compare(run.train(self.batches, pieces), self.reference(optimizer, pieces), optimizer))
        return worst

    def in_two_ranks(self) -> dict[str, Outcome]:
        """Tensors, and experts where the model has some."""
        layers = len(self.captured.graph.layers)
        head = f"plan v1 graph=g cluster=c schedule=1f1b batch={BATCH} micro_batch="
        plans = {"tensor": f"{head}4\nstage 0: layers 0-{layers - 1} tensor=2: (a b)={BATCH}\n"}
        if any(layer.experts for layer in self.captured.graph.layers):
            plans["expert"] = f"{head}{BATCH}\nstage 0: layers 0-{layers - 1} expert: (a b)=11,5\n"
        found = in_two_ranks(self.jobs, self.captured, plans)
        outcomes = {}
        for plan in plans:
            worst = Outcome("equal")
            for optimizer in self.jobs:
                worst = worse(worst, self._judged(found[f"{plan} {optimizer}"], optimizer, QUARTERS if plan == "tensor" else UNEQUAL))
            outcomes[plan] = worst
        return outcomes

    def _judged(self, found: dict[str, Any], optimizer: str, pieces: Pieces) -> Outcome:
        if "trained" in found and not found["divided"]:
            return Outcome("none", sentence="nothing of it can be divided")
        return judged(found, optimizer, lambda: self.reference(optimizer, pieces))


def judged(found: dict[str, Any], optimizer: str, true: Callable[[], Trained]) -> Outcome:
    """What ranks came to."""
    if "refused" in found:
        return Outcome("refused", sentence=found["refused"])
    if "error" in found:
        return Outcome("failed", sentence=found["error"])
    return compare(found["trained"], true(), optimizer)


def reference_in_pieces(architecture: Architecture, job: Job, pieces: Pieces) -> Trained:
    """Of one process that computes piece after piece."""
    model, batches = job.build_model(), [job.samples.batch(step) for step in range(STEPS)]
    return train_in_pieces(model, own_loss, batches, pieces, job.optimizer, SEED, partial(share, model, architecture.task))


def eagerly(architecture: Architecture, jobs: dict[str, Job], uncaptured: Uncaptured) -> Outcome:
    """Two ranks with unequal shares, each with the whole model as it is."""
    found = in_two_ranks(
        jobs, uncaptured, {"data": f"plan v1 graph=g cluster=c batch={BATCH} micro_batch={BATCH}\nstage 0: layers 0-0: a=11 b=5\n"}
    )
    worst = Outcome("equal")
    for optimizer, job in jobs.items():
        true = partial(reference_in_pieces, architecture, job, UNEQUAL)
        worst = worse(worst, judged(found[f"data {optimizer}"], optimizer, true))
    return msgspec.structs.replace(worst, eager=True)


_ORDER = ("equal", "none", "refused", "failed", "different")


def worse(one: Outcome, other: Outcome) -> Outcome:
    """The one to tell of."""
    return max(one, other, key=lambda outcome: (_ORDER.index(outcome.kind), outcome.difference))


def compare(found: Trained, true: Trained, optimizer: str) -> Outcome:
    """Losses relative to themselves, weights to the largest of their tensor, or to a hundredth where all are smaller."""
    worst, where = max((_apart(a, b), f"loss {n}") for n, (a, b) in enumerate(zip(found.losses, true.losses, strict=True)))
    for name, weight in true.weights.items():
        if name not in found.weights:
            return Outcome("failed", math.inf, f"{name} is missing")
        difference = float((found.weights[name] - weight).abs().max() / weight.abs().max().clamp(min=1e-2)) if weight.numel() else 0.0
        if not difference <= worst:
            worst, where = difference, name
    return Outcome("equal" if worst <= TOLERANCE else "different", worst, f"{optimizer}, {where}")


def _apart(own: float, true: float) -> float:
    return 0.0 if own == true else abs(own - true) / max(abs(true), 1e-6) if math.isfinite(own) else math.inf


def attempt(run: Callable[[], Outcome]) -> Outcome:
    """What came of it, whatever it is."""
    try:
        return run()
    except AtollError as error:
        return Outcome("refused", sentence=str(error))
    except Exception:
        return Outcome("failed", sentence=traceback.format_exc())


def try_out(architecture: Architecture) -> Row:
    """All ways of computing one architecture."""
    began = time.monotonic()
    ways = _judged_ways(architecture)
    if any(outcome.kind == "different" for outcome in ways.values()):
        exact = _judged_ways(in_double_precision(architecture))
        ways = {way: _with_double(outcome, exact.get(way)) for way, outcome in ways.items()}
    return Row(architecture.name, architecture.task, ways, time.monotonic() - began)


def in_double_precision(architecture: Architecture) -> Architecture:
    """The same: rounding is a billionth of what it was, whatever the model makes of it; an error stays."""

    def batch(samples: int) -> dict[str, Tensor]:
        return {name: value.double() if value.is_floating_point() else value for name, value in architecture.batch(samples).items()}

    return dataclasses.replace(architecture, build=lambda: architecture.build().double(), batch=batch)


def _with_double(single: Outcome, double: Outcome | None) -> Outcome:
    if single.kind != "different" or double is None or double.kind != "equal":
        return single
    return msgspec.structs.replace(double, single=single.difference)


def _judged_ways(architecture: Architecture) -> dict[str, Outcome]:
    try:
        return _tried(architecture)
    except AtollError as error:
        return dict.fromkeys(WAYS, Outcome("refused", sentence=str(error)))
    except Exception:
        return dict.fromkeys(WAYS, Outcome("failed", sentence=traceback.format_exc()))


def _tried(architecture: Architecture) -> dict[str, Outcome]:
    jobs = jobs_of(architecture)
    captured = capture_or_run(next(iter(jobs.values())), check=True, most_bytes=2.0**33)
    if isinstance(captured, Uncaptured):
        refused = Outcome("refused", sentence=captured.notes[0])
        return dict.fromkeys(WAYS, refused) | {"data 11:5": attempt(partial(eagerly, architecture, jobs, captured))}
    trial = Trial(architecture, jobs, captured)
    return {
        "pipeline": attempt(partial(trial.in_one_process, 3, QUARTERS)),
        "data 11:5": attempt(partial(trial.in_one_process, 1, UNEQUAL)),
        "swarm": attempt(partial(trial.in_one_process, 2, QUARTERS, contributed=True)),
    } | trial.in_two_ranks()


def table(rows: Iterable[Row]) -> list[list[str]]:
    """A line for every architecture; a sentence that stands for all ways is written once."""
    return [[row.name.replace(f" {row.task}", "", 1), row.task, *(_cell(row.ways.get(way)) for way in WAYS)] for row in rows]


def _cell(outcome: Outcome | None) -> str:
    if outcome is None or outcome.kind == "none":
        return "–"
    if outcome.kind == "refused":
        return "refused"
    told = (
        f"≠ {outcome.difference:.0e}"
        if outcome.kind == "different"
        else f"{outcome.difference:.0e}"
        if outcome.kind == "equal"
        else "failed"
    )
    return told + (" as it is" if outcome.eager else "") + ("" if outcome.single is None else f" ({outcome.single:.0e})")


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Of the ways of all architectures, and how many architectures were equal in every way that was not refused."""
    found = Counter(outcome.kind for row in rows for outcome in row.ways.values() if outcome.kind != "none")
    return {kind: found[kind] for kind in ("equal", "refused", "failed", "different")}


def refusals(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Each architecture's sentences, with the ways they refuse."""
    told = []
    for row in rows:
        by_sentence: dict[str, list[str]] = {}
        for way, outcome in row.ways.items():
            if outcome.kind in ("refused", "failed", "different"):
                told_in = outcome.sentence.strip().splitlines() or [""]
                by_sentence.setdefault(told_in[-1 if outcome.kind == "failed" else 0], []).append(way)
        told += [(row.name, "all" if len(ways) == len(row.ways) else ", ".join(ways), sentence) for sentence, ways in by_sentence.items()]
    return told


def page(rows: Sequence[Row], command: str) -> str:
    """docs/zoo.md."""
    found = counts(rows)
    doubled = sum(outcome.single is not None for row in rows for outcome in row.ways.values())
    prose = [
        f"Made by `{command}`: {len(rows)} models of {len({row.name.split()[0] for row in rows})} Hugging Face architectures at tiny "
        "sizes, with dropout, SpecAugment, layer drop and auxiliary losses as their configurations have them, labels padded, and "
        "`model(**batch).loss`. One process (a plain PyTorch loop over whole "
        "batches of 16) is compared with a pipeline of three stages, two replicas with 11 and 5 samples, a swarm's stages, and two ranks "
        "that divide tensors or experts: the losses of two steps and all weights after them, with SGD with momentum and with AdamW.",
        f"**{sum(found.values())} ways of computing them: {found['equal']} equal to 1e-5, {found['refused']} refused with a sentence, "
        f"{found['failed']} failed, {found['different']} silently different.**",
        "A number is the largest relative difference; – means that there is nothing to divide, “as it is” that the model cannot be "
        "captured, so that each device runs all of it ([where](lockstep.md#what-cannot-be-captured)). Random numbers are drawn by pieces "
        f"of the batch. In {doubled} places single precision differs by more than 1e-5, in brackets, and the number is that of double "
        "precision: batch normalisation of a few values, or a ReLU close to zero, makes much of rounding, while an error would be as "
        "large as before.",
    ]
    lines = [
        "# The zoo",
        "",
        *(line for paragraph in prose for line in (textwrap.fill(paragraph, 100, break_on_hyphens=False), "")),
        f"| architecture | task | {' | '.join(WAYS)} |",
        f"|---|---|{'---|' * len(WAYS)}",
        *(f"| {' | '.join(line)} |" for line in table(rows)),
        "",
        "## Refused",
        "",
        "| architecture | ways | sentence |",
        "|---|---|---|",
        *(f"| {name} | {ways} | {sentence.replace('|', '¦')} |" for name, ways, sentence in refusals(rows)),
        "",
    ]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """What is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures by name")
    parser.add_argument("--task", nargs="+", help="architectures by task")
    parser.add_argument("--limit", type=int, help="the first so many")
    parser.add_argument("--keep", type=Path, help="a file of what was found, to go on from: what is in it is not computed again")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="the page of the documentation to write")
    return parser.parse_args()


def kept_rows(path: Path | None) -> dict[str, Row]:
    """What was found before, by name."""
    lines = path.read_bytes().splitlines() if path is not None and path.exists() else []
    return {row.name: row for row in (msgspec.json.decode(line, type=Row) for line in lines)}


def tell(row: Row, number: str) -> None:
    """A line as soon as it is known, with what was refused."""
    cells = " ".join(f"{way} {_cell(row.ways[way])}" for way in WAYS if way in row.ways)
    print(f"{number} {row.seconds:5.1f} s  {row.name}: {cells}", file=sys.stderr, flush=True)
    for _, ways, sentence in refusals([row]):
        print(f"      {ways}: {sentence[:300]}", file=sys.stderr, flush=True)


def main() -> int:
    """The table; 1 where something is silently different or has failed."""
    asked = arguments()
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chosen = [a for a in architectures() if not asked.only or {a.name, a.name.split()[0]} & {*asked.only}]
    chosen = [a for a in chosen if not asked.task or a.task in asked.task]
    chosen = chosen[: asked.limit]
    kept = kept_rows(asked.keep)
    rows = []
    for number, architecture in enumerate(chosen, 1):
        row = kept.get(architecture.name) or try_out(architecture)
        rows.append(row)
        if architecture.name not in kept:
            tell(row, f"{number:3} of {len(chosen)}")
            if asked.keep:
                with asked.keep.open("ab") as file:
                    file.write(msgspec.json.encode(row) + b"\n")
        if asked.write and (architecture is chosen[-1] or architecture.name not in kept):  # what is known so far
            command = f"python benchmarks/zoo.py{' --keep ROWS' if asked.keep else ''} --write docs/zoo.md"
            asked.write.write_text(page(rows, command), encoding="utf-8")
    found = counts(rows)
    if asked.json:
        print(json.dumps({"rows": msgspec.to_builtins(rows), "counts": found, "machine": machine()}, indent=1))
    else:
        print_table("Largest relative difference from one process", ["architecture", "task", *WAYS], table(rows))
        print(f"\n{len(rows)} architectures: " + ", ".join(f"{kind} {count}" for kind, count in found.items()))
    return 1 if found["different"] or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
