"""Gradients of every step added up over sites: real processes, real TLS, against the formula written down in plain PyTorch and NumPy."""

import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.warm import run_warm

from . import island_job
from .test_faults import events_of, kill, notes_of, started
from .test_islands import ATOLL, EVERY_STEP, HEAD, ISLANDS, cluster, int4, run_job, samples_of, weights_of

pytestmark = pytest.mark.timeout(300)
GRADIENTS = ["--mode", "islands", "--exchange", "gradients"]


def losses_of(run: Path) -> list[float]:
    """Of every step, as it was made last."""
    losses = {event["step"]: event["loss"] for event in events_of(run / "events.jsonl") if event["event"] == "step_finished"}
    return [losses[step] for step in sorted(losses)]


def buckets_of(named: dict[str, nn.Parameter]) -> list[list[str]]:
    """From the last parameter to the first, closed where they have an eighth of all bytes."""
    least = 4 * sum(value.numel() for value in named.values()) // 8
    found: list[list[str]] = [[]]
    for name in reversed(list(named)):
        if sum(4 * named[each].numel() for each in found[-1]) >= least:
            found.append([])
        found[-1].append(name)
    return found


def by_hand(shares: Sequence[int], optimizer: str, coded: bool, steps: int = island_job.STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """One model; every site's gradient of its samples with what it owes, as it arrives, and their sum by the weight of all samples."""
    model = island_job.job.build_model("cpu")
    made: Any = island_job.OPTIMIZERS[optimizer]
    update: torch.optim.Optimizer = made(model.parameters())
    named = dict(model.named_parameters())
    buckets, bounds = buckets_of(named), np.cumsum([0, *shares])
    assert len(buckets) == 3
    owed: list[list[Any]] = [[np.float32(0)] * len(buckets) for _ in shares]
    losses = []
    for step in range(steps):
        sums: list[Any] = [np.float32(0)] * len(buckets)
        totals, weights = [], []
        for site, (start, stop) in enumerate(pairwise(bounds)):
            total, weight = island_job.loss(model, samples_of(step, int(start), int(stop)))
            gradients = dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))
            totals.append(float(total.detach()))
            weights.append(float(weight))
            for number, names in enumerate(buckets):
                whole = np.concatenate([gradients[name].numpy().ravel() for name in names]) + owed[site][number]
                arrived = int4(whole) if coded else whole
                owed[site][number] = whole - arrived
                sums[number] = sums[number] + arrived
        for number, names in enumerate(buckets):
            parts = np.split(sums[number] / np.float32(sum(weights)), np.cumsum([named[name].numel() for name in names])[:-1])
            for name, part in zip(names, parts, strict=True):
                named[name].grad = torch.from_numpy(part.astype(np.float32).copy()).view_as(named[name])
        if optimizer == "clipped":
            assert nn.utils.clip_grad_norm_(model.parameters(), island_job.CLIPPED) > island_job.CLIPPED
        update.step()
        losses.append(sum(totals) / sum(weights))
    return losses, model.state_dict()


def check(run: Path, optimizer: str, losses: list[float], weights: dict[str, Tensor]) -> None:
    found = weights_of(run, optimizer)
    assert losses_of(run) == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    said = [{note.partition("has the weights ")[2] for note in notes_of(site) if "has the weights" in note} for site in sites_of(run)]
    assert len(said) > 1
    assert said[0]
    assert all(each == said[0] for each in said)  # to the bit, at every save


def sites_of(run: Path) -> list[Path]:
    return sorted((run / "sites").iterdir())


def planned(tmp_path: Path, counts: Sequence[int], stage: str, micro_batch: int) -> list[str]:
    """Where the samples are taken by whom."""
    (tmp_path / "p.plan").write_text(f"{HEAD.replace('micro_batch=5', f'micro_batch={micro_batch}')}\nstage 0: layers 0-3: {stage}\n")
    return ["-c", str(cluster(tmp_path / "c.toml", counts)), "--plan", str(tmp_path / "p.plan"), *GRADIENTS]


@pytest.mark.parametrize("optimizer", ["clipped", "adamw"])
def test_exact_gradients_of_unequal_sites_are_one_process_on_the_same_batches(optimizer: str, tmp_path: Path) -> None:
    """Three sites; one of two processes."""
    given = planned(tmp_path, (1, 2, 1), "o/0=4 r/0=2 r/1=1 k/0=3", 5)
    run_job([*given, "--outer-codec", "none", "--out", str(tmp_path / "run")], optimizer)
    check(tmp_path / "run", optimizer, *by_hand((10,), optimizer, coded=False))


def test_four_bits_with_what_is_owed_are_the_formula_in_micro_batches_too(tmp_path: Path) -> None:
    """Every process makes several micro-batches, of which the sum is sent; and the run goes on with what every site owes."""
    given = [*planned(tmp_path, (1, 2), "o/0=4 r/0=2 r/1=4", 2), "--outer-codec", "int4"]
    run_job([*given, "--out", str(tmp_path / "run")], "adamw", steps=7)
    run_job(["--resume", str(tmp_path / "run"), *given], "adamw")
    check(tmp_path / "run", "adamw", *by_hand((4, 6), "adamw", coded=True))


def test_gradients_go_on_with_the_run_of_any_mode_and_other_modes_with_theirs(tmp_path: Path) -> None:
    file, run = cluster(tmp_path / "c.toml", (1, 2)), tmp_path / "run"
    gradients, weights = ["-c", str(file), *GRADIENTS, "--outer-codec", "none"], ["-c", str(file), *ISLANDS, "--exchange", "weights"]
    run_job(["--alone", "--out", str(run)], "sgd", steps=3)
    run_job(["--resume", str(run), *gradients], "sgd", steps=6)
    run_job(["--resume", str(run), *weights, *EVERY_STEP], "sgd", steps=9)
    run_job(["--resume", str(run), *gradients], "sgd")
    check(run, "sgd", *by_hand((10,), "sgd", coded=False))


def test_a_killed_site_sends_all_back_to_the_last_checkpoint_with_what_they_owed(tmp_path: Path) -> None:
    run, allowed = tmp_path / "run", tmp_path / "allowed"
    allowed.write_text("5")
    options = ["--exchange", "gradients", "--outer-codec", "int4", "--max-restarts", "1", "--checkpoint-every", "2"]
    with started(tmp_path, str(allowed), *options) as (process, until):
        until(lambda: len(losses_of(run)) >= 5 and (run / "checkpoints" / "step-00000004").exists())
        kill(process, "coordinator")
        kill(process, "rome rank 0")
        allowed.write_text(str(island_job.STEPS))
        assert process.wait() == 0, (tmp_path / "log").read_text()
    check(run, "sgd", *by_hand((5, 5), "sgd", coded=True))
    restarted = [event["reason"] for event in events_of(run / "events.jsonl") if event["event"] == "restarted"]
    assert len(restarted) == 1
    assert "rome" in restarted[0]
    assert "all sites go on after step 4" in restarted[0]


def test_a_run_that_was_asked_to_stop_ends_after_the_same_step_everywhere_and_goes_on(tmp_path: Path) -> None:
    """With more steps than it can make before it hears of it."""
    run, given = tmp_path / "run", ["--exchange", "gradients", "--outer-codec", "int8"]
    with started(tmp_path, "400", *given) as (process, until):
        until(lambda: len(losses_of(run)) >= 4)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130, (tmp_path / "log").read_text()
    made = len(losses_of(run))
    assert [len([event for event in events_of(site / "events.jsonl") if event["event"] == "step_finished"]) for site in sites_of(run)] == [
        made,
        made,
    ]
    run_job(["--resume", str(run), "--mode", "islands", *given], "sgd", made + 2)
    assert len(losses_of(run)) == made + 2


def test_a_killed_site_ends_the_run_where_nobody_may_start_it_again(tmp_path: Path) -> None:
    run, allowed = tmp_path / "run", tmp_path / "allowed"
    allowed.write_text("2")
    with started(tmp_path, str(allowed), "--exchange", "gradients") as (process, until):
        until(lambda: len(losses_of(run)) >= 2)
        kill(process, "rome rank 0")
        assert process.wait() == 1
    said = (tmp_path / "log").read_text()
    assert "error: rome: " in said
    assert "every step needs the gradients of all sites" in said


@pytest.mark.parametrize(
    "stages",
    [("layers 0-1: o/0=5 r/0=5", "layers 2-3: o/1=5 r/1=5"), ("layers 0-3 sharded: o/[0-1]=3,2 r/[0-1]=3,2",)],
    ids=["pipeline", "sharded"],
)
def test_sites_whose_ranks_have_parts_of_the_model_are_refused(stages: Sequence[str], tmp_path: Path) -> None:
    plan = tmp_path / "p.plan"
    plan.write_text("\n".join([HEAD, *(f"stage {number}: {stage}" for number, stage in enumerate(stages)), ""]))
    given = ["-c", str(cluster(tmp_path / "c.toml", (2, 2))), "--plan", str(plan), *GRADIENTS, "--out", str(tmp_path / "run")]
    done = run_warm([*ATOLL, "run", island_job.__file__, *given, "--", "sgd", "4"])
    assert done.returncode == 2
    assert "--exchange gradients: the ranks of oslo have parts of the model each" in done.stderr
