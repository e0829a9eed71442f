"""What the times of a plan rest on, and trial steps: as many as are worth it, of which nobody but the prediction hears."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import atoll
from atoll.cli.forkable_start import ForkableStart
from atoll.cli.target import Target
from atoll.cli.trial import grounds_of, grounds_without_trial
from atoll.cluster import Cluster, Measurements, parse_cluster
from atoll.cluster.host_name import this_host
from atoll.graph import preset
from atoll.plan import Plan, parse_plan
from atoll.runtime.mode import mode_runtime
from atoll.runtime.modes.lockstep.trial import job_to_try, try_steps
from atoll.runtime.training import Reason
from tests.cli.test_main import PLAN, TINY

JOB = atoll.Job(
    model=lambda: torch.nn.Linear(2, 1),
    loss=lambda model, batch: model(batch).square().mean(),
    data=torch.zeros(64, 2),
    optimizer=torch.optim.SGD,
    batch_size=8,
    steps=100,
)


def probed(*, host: str = "", address: str = "") -> tuple[Cluster, Plan]:
    """Two devices of a host that was probed, by default this one, and a plan for them."""
    name = host or this_host()
    tiny = TINY.replace("devices =", f'name = "{name}"\n  devices =')
    cluster = parse_cluster(tiny.replace("devices =", f'address = "{address}"\n  devices =') if address else tiny, "tiny.toml")
    (site,) = cluster.sites
    (one,) = site.hosts
    measured = Measurements(operator_seconds=1e-6, threads=1)
    devices = [msgspec.structs.replace(d, kind=msgspec.structs.replace(d.kind, name="core", measured=measured)) for d in one.devices]
    site = msgspec.structs.replace(site, hosts=(msgspec.structs.replace(one, devices=tuple(devices)),))
    return msgspec.structs.replace(cluster, sites=(site,)), parse_plan(PLAN.replace("oslo-0/", f"{name}/"))


def test_what_times_rest_on_is_said() -> None:
    cluster, plan = parse_cluster(TINY, "tiny.toml"), parse_plan(PLAN)
    assert grounds_without_trial(plan, cluster) == (
        "times are by the cluster file's or the catalogue's figures of A100-80GB; nothing of the job was measured there"
    )
    elsewhere = "times are by what `atoll probe` measured of core; the job itself was not tried there"
    assert grounds_without_trial(*reversed(probed(host="other"))) == elsewhere
    assert grounds_without_trial(*reversed(probed(address="far.example.org"))) == elsewhere
    here = "times are by the probe's figures of this machine; `atoll run` tries the job itself before it predicts"
    assert grounds_without_trial(*reversed(probed())) == here


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"steps": 3}, "it has only 3 steps"),
        ({"compile": True}, "compiling it would take long"),
        (
            {"data": type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda self: iter(torch.zeros(99, 2))})()},
            "is a stream",
        ),
        ({}, "the model is large"),
    ],
)
def test_a_job_that_cannot_be_tried_in_a_moment_is_priced_by_the_probe(
    changed: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, plan = probed()
    found = preset("bert-large", batch_size=8)
    model = Target(found.graph, 8, found.optimizer, 0.0, job=replace(JOB, **changed))
    start = ForkableStart(mode_runtime("lockstep"))
    start.why_not = "the script's process has 7 threads"
    (said,) = grounds_of(plan, model, cluster, start, "train.py").sentences
    assert said == "times are by the probe's figures of this machine: the job was not tried, since the script's process has 7 threads"
    monkeypatch.setattr(start, "server", object())
    grounds = grounds_of(plan, model, cluster, start, "train.py")
    assert grounds.calibration is None
    assert why in grounds.sentences[0]


class Counted:
    """A training that makes steps of nothing."""

    def __init__(self, most: int) -> None:
        self.most, self.losses, self.asked = most, list[float](), most

    @property
    def reason(self) -> Reason | None:
        return "stopped" if self.asked < len(self.losses) else "done" if len(self.losses) == self.most else None

    def step(self) -> None:
        self.losses.append(1.0)

    def stop(self) -> None:
        self.asked = min(self.asked, len(self.losses))


@pytest.mark.parametrize(
    ("step_seconds", "is_first", "steps"),
    [(0.001, True, 102), (0.125, True, 17), (0.75, True, 5), (3.0, True, 3), (0.1, False, 200)],
    ids=["very short steps", "short ones", "longer ones", "long ones", "another rank"],
)
def test_the_first_rank_ends_a_trial(step_seconds: float, is_first: bool, steps: int) -> None:
    training: Any = Counted(200)
    try_steps(training, 2.0, is_first=is_first, clock=lambda: step_seconds * len(training.losses))
    assert len(training.losses) == steps


def test_a_trial_is_longer_where_steps_differ() -> None:
    """As beside a busy neighbour, which a process shares its core with in some steps and not in others."""
    training: Any = Counted(200)
    passed = [sum(0.1 + 0.02 * (made * 3 % 5) for made in range(count)) for count in range(201)]
    try_steps(training, 2.0, is_first=True, clock=lambda: passed[len(training.losses)])
    assert 3.0 < passed[len(training.losses)] < 7.0


def test_a_trial_has_the_data_that_is_loaded_and_nobody_who_listens(tmp_path: Path) -> None:
    told: list[Any] = []
    job = replace(JOB, callbacks=[told.append], eval_data=torch.zeros(8, 2), eval_every=1)
    samples = job.samples
    tried = job_to_try(job)
    assert tried.samples is samples
    assert (list(tried.callbacks), tried.eval_data, tried.eval_samples, tried.eval_every) == ([], None, None, None)
    assert job.eval_samples is not None
    assert len(job.callbacks) == 1
