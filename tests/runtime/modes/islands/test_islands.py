"""Sites as a user starts them: real processes, real TLS, against the formula written down in plain PyTorch and NumPy."""

import json
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.runtime.checkpoint.trained import load_trained
from tests.warm import run_warm

from . import island_job

pytestmark = pytest.mark.timeout(300)

ATOLL = [sys.executable, "-c", "from atoll.cli import main; main()"]
SITE = """[[site]]
name = "{name}"
{rule}
network = {{ bandwidth = "1 Gbit/s", latency = "0.1 ms" }}
  [[site.host]]
  name = "{host}"
  devices = [{{ kind = "T4", count = {count} }}]
"""
LINK = '[[link]]\nbetween = ["{a}", "{b}"]\nbandwidth = "100 Mbit/s"\nlatency = "10 ms"\n'
ISLANDS = ["--mode", "islands", "--equal-steps"]
EVERY_STEP = ["--inner-steps", "1", "--delay-steps", "0", "--outer-codec", "none", "--outer-learning-rate", "1", "--outer-momentum", "0"]
HEAD = 'plan v1 graph="island job" cluster=sites mode=islands batch=10 micro_batch=5'
INT4 = ["--outer-codec", "int4", "--outer-learning-rate", "0.6", "--outer-momentum", "0.9"]


def cluster(path: Path, counts: Sequence[int], may_send: Mapping[str, Sequence[str]] = {}) -> Path:
    """A file of sites with so many devices each, and what may leave them."""
    names = ["oslo", "rome", "kyiv", "bern"][: len(counts)]
    rules = {name: f"may_send = {json.dumps(list(kinds))}" for name, kinds in may_send.items()}
    sites = [SITE.format(name=name, host=name[0], count=count, rule=rules.get(name, "")) for name, count in zip(names, counts, strict=True)]
    links = [LINK.format(a=a, b=b) for i, a in enumerate(names) for b in names[i + 1 :]]
    path.write_text('name = "sites"\n' + "".join(sites) + "".join(links))
    return path


def run_job(command: Sequence[str], optimizer: str, steps: int = island_job.STEPS, *more: str) -> None:
    """`atoll run` to its end."""
    done = run_warm([*ATOLL, "run", island_job.__file__, *command, "--", optimizer, str(steps), *more])
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def weights_of(run: Path, optimizer: str) -> dict[str, Tensor]:
    """What a run leaves."""
    model, _ = load_trained(replace(island_job.job, optimizer=island_job.OPTIMIZERS[optimizer]), run)
    return model.state_dict()


def losses_of(run: Path) -> list[float]:
    lines = (json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines())
    return [line["loss"] for line in lines if line["event"] == "step_finished"]


def samples_of(step: int, start: int, stop: int) -> Any:
    """Of a site, by hand: its part of the global batch."""
    places = range(step * island_job.BATCH + start, step * island_job.BATCH + stop)
    rows = [island_job.data[island_job.job.samples.index(place)] for place in places]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def int4(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """What arrives of a row of numbers: blocks of 256, each in fifteenths of twice its largest magnitude."""
    found = np.zeros_like(values)
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        peak = np.abs(block).max().astype(np.float32)
        found[start : start + 256] = np.round(block * (np.float32(7) / peak)) * (peak / np.float32(7))
    return found


class Site:
    """One site of the reference."""

    def __init__(self, start: int, stop: int, optimizer: str) -> None:
        self.start, self.stop = start, stop
        self.model = island_job.job.build_model("cpu")
        self.optimizer = island_job.OPTIMIZERS[optimizer](self.model.parameters())
        self.names = sorted(name for name, _ in self.model.named_parameters())
        self.owed = np.zeros(len(self.row()), np.float32)

    def row(self) -> "np.ndarray[Any, Any]":
        named = dict(self.model.named_parameters())
        return np.concatenate([named[name].detach().numpy().ravel() for name in self.names]).copy()

    def take(self, row: "np.ndarray[Any, Any]") -> None:
        named, place = dict(self.model.named_parameters()), 0
        for name in self.names:
            count = named[name].numel()
            named[name].data = torch.from_numpy(row[place : place + count].reshape(named[name].shape).copy())
            place += count

    def step(self, step: int) -> tuple[float, float]:
        total, weight = island_job.loss(self.model, samples_of(step, self.start, self.stop))
        self.optimizer.zero_grad()
        (total / weight).backward()
        self.optimizer.step()
        return float(total.detach()), float(weight)


def formula(
    shares: Sequence[int], optimizer: str, *, steps: int, delay: int, rate: float, momentum: float, coded: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """The outer update by hand: losses of all steps, and the common weights after the last round."""
    bounds = np.cumsum([0, *shares])
    sites = [Site(int(a), int(b), optimizer) for a, b in pairwise(bounds)]
    common, moving = sites[0].row(), np.zeros(len(sites[0].row()), np.float32)
    losses, weights = [], np.zeros(len(sites))
    pending: list[Any] | None = None
    for step in range(1, island_job.STEPS + 1):
        made = [site.step(step - 1) for site in sites]
        losses.append(sum(total for total, _ in made) / sum(weight for _, weight in made))
        weights += [weight for _, weight in made]
        for what in ("finish", "begin", "finish"):
            last = step == island_job.STEPS
            if what == "begin" and (step % steps == 0 or last):
                pending = [step, [site.row() for site in sites], [], weights / weights.sum()]
                for site, sent in zip(sites, pending[1], strict=True):
                    whole = (common - sent) + site.owed
                    arrived = int4(whole) if coded else whole
                    pending[2].append((arrived, whole - arrived))
                weights = np.zeros(len(sites))
            if what == "finish" and pending is not None and (step >= pending[0] + delay or last):
                mean = sum(share * arrived for share, (arrived, _) in zip(pending[3], pending[2], strict=True)).astype(np.float32)
                moving = np.float32(momentum) * moving + mean
                common = common - np.float32(rate) * (mean + np.float32(momentum) * moving)
                for site, sent, (_, rest) in zip(sites, pending[1], pending[2], strict=True):
                    site.owed = rest
                    site.take(common + (site.row() - sent))
                pending = None
    sites[0].take(common)
    return losses, sites[0].model.state_dict()


def one_process(steps: int = island_job.STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """The same global batches in a loop as anybody writes it."""
    model: nn.Module = deepcopy(island_job.job.build_model("cpu"))
    optimizer = island_job.OPTIMIZERS["sgd"](model.parameters())
    losses = []
    for step in range(steps):
        total, weight = island_job.loss(model, samples_of(step, 0, island_job.BATCH))
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append(float(total.detach() / weight))
    return losses, model.state_dict()


def check_equal(run: Path, optimizer: str, losses: list[float], weights: dict[str, Tensor]) -> None:
    found = weights_of(run, optimizer)
    assert losses_of(run) == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "stages"),
    [
        (1, ()),
        (2, ()),
        (2, ("layers 0-1: o/0=5 r/0=5", "layers 2-3: o/1=5 r/1=5")),
        (2, ("layers 0-3 sharded: o/[0-1]=3,2 r/[0-1]=3,2",)),
    ],
    ids=["one process", "data parallel", "pipeline", "sharded"],
)
def test_sites_that_average_every_step_are_one_process_on_the_same_batches(count: int, stages: Sequence[str], tmp_path: Path) -> None:
    file, plan = cluster(tmp_path / "c.toml", (count, count)), tmp_path / "p.plan"
    plan.write_text("\n".join([HEAD, *(f"stage {number}: {stage}" for number, stage in enumerate(stages)), ""]))
    given = ["--plan", str(plan)] if stages else []
    run_job(["-c", str(file), *given, *ISLANDS, *EVERY_STEP, "--out", str(tmp_path / "run")], "sgd")
    check_equal(tmp_path / "run", "sgd", *one_process())


def test_an_outer_update_in_four_bits_applied_later_is_the_formula(tmp_path: Path) -> None:
    """Unequal sites; a last round that is shorter."""
    plan = tmp_path / "p.plan"
    plan.write_text(f"{HEAD}\nstage 0: layers 0-3: o/0=4 r/0=6\n")
    given = ["-c", str(cluster(tmp_path / "c.toml", (1, 1))), "--plan", str(plan), *ISLANDS, "--inner-steps", "5", "--delay-steps", "2"]
    run_job([*given, *INT4, "--out", str(tmp_path / "run")], "adamw")
    check_equal(tmp_path / "run", "adamw", *formula((4, 6), "adamw", steps=5, delay=2, rate=0.6, momentum=0.9, coded=True))


def test_a_resumed_run_has_its_momentum_its_debts_and_every_sites_optimizer(tmp_path: Path) -> None:
    file, run = cluster(tmp_path / "c.toml", (1, 1)), tmp_path / "run"
    given = [*ISLANDS, "--inner-steps", "3", "--delay-steps", "0", *INT4]
    run_job(["-c", str(file), *given, "--out", str(run)], "adamw", steps=6)
    run_job(["--resume", str(run), *given], "adamw")
    check_equal(run, "adamw", *formula((5, 5), "adamw", steps=3, delay=0, rate=0.6, momentum=0.9, coded=True))


def test_sites_go_on_with_one_processs_run_and_one_process_with_theirs(tmp_path: Path) -> None:
    file, run = cluster(tmp_path / "c.toml", (1, 2)), tmp_path / "run"
    run_job(["--alone", "--out", str(run)], "sgd", steps=4)
    run_job(["--resume", str(run), "-c", str(file), *ISLANDS, *EVERY_STEP], "sgd", steps=8)
    run_job(["--resume", str(run), "--alone"], "sgd")
    check_equal(run, "sgd", *one_process())
