"""Updates that are far too large are refused by name in a real run, and what is left is joined as asked for: against NumPy."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.control.rounds.messages import Offer, UpdateId
from atoll.errors import JobError
from atoll.plan.modes.islands import IslandsOptions
from atoll.runtime.modes.islands.aggregate import Aggregation, RoundSum, aggregate, aggregation_of, steady_squared_norm
from atoll.runtime.modes.islands.chunks import ChunkForm, packed

from . import island_job
from .test_faults import events_of
from .test_islands import EVERY_STEP, HEAD, ISLANDS, Site, cluster, run_job, weights_of

pytestmark = pytest.mark.timeout(300)
SITES = ("oslo", "rome", "kyiv", "bern", "wien")
SHARES = ((0, 4), (4, 8), (8, 10))
FORM = ChunkForm(1000, 3)


def summed(rows: Sequence[np.ndarray[Any, Any]], weights: Sequence[float], terms: Aggregation, steps: Sequence[int] = ()) -> RoundSum:
    """Of updates as they come from other sites."""
    updates = []
    for number, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        made = steps[number] if steps else 5
        offer = Offer(UpdateId(SITES[number], 1, 1), 0, 3, 10, 10 + made, weight, "")
        parts = FORM.parts(torch.from_numpy(row))
        updates.append((offer, [packed(make_codec("none").encode(part.clone())) for part in parts]))
    return aggregate(updates, FORM, terms)


def rows_of(count: int) -> list[np.ndarray[Any, Any]]:
    made = np.random.default_rng(count)
    common = made.standard_normal(1000)
    return [(common + 0.3 * made.standard_normal(1000)).astype(np.float32) for _ in range(count)]


def weighted(rows: Sequence[np.ndarray[Any, Any]], weights: Sequence[float]) -> np.ndarray[Any, Any]:
    return np.average(np.array(rows, np.float64), axis=0, weights=weights)


def check(found: RoundSum, mean: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(found.mean.numpy(), mean, rtol=2e-6, atol=1e-6)


def test_the_mean_is_without_what_is_far_too_large_and_says_whose() -> None:
    rows, weights = rows_of(4), [1.0, 2.0, 3.0, 4.0]
    check(summed(rows, weights, Aggregation()), weighted(rows, weights))
    rows[2] = rows[2] * np.float32(40)
    found = summed(rows, weights, Aggregation())
    check(found, weighted([rows[0], rows[1], rows[3]], [1.0, 2.0, 4.0]))
    assert list(found.refused) == ["kyiv"]
    assert found.refused["kyiv"].startswith("the update of kyiv has a norm of")
    assert not summed(rows[1:3], weights[1:3], Aggregation()).refused  # of two nobody can tell whose it is


@pytest.mark.parametrize(("steps", "refused"), [((5, 5, 150), False), ((150, 150, 5), True), ((5, 5, 5), True)])
def test_who_has_made_more_steps_may_send_more(steps: Sequence[int], refused: bool) -> None:
    rows = rows_of(3)
    rows[2] = rows[2] * np.float32(80)
    assert bool(summed(rows, [1.0] * 3, Aggregation(), steps).refused) == refused


def test_clipped_updates_count_for_no_more_than_the_median_one() -> None:
    rows, weights = rows_of(3), [1.0, 5.0, 2.0]
    rows[1] = rows[1] * np.float32(4)
    norms = [np.linalg.norm(row.astype(np.float64)) for row in rows]
    clipped = [row * min(1.0, np.median(norms) / norm) for row, norm in zip(rows, norms, strict=True)]
    found = summed(rows, weights, Aggregation("clipped"))
    check(found, weighted(clipped, weights))
    assert not found.refused


@pytest.mark.parametrize("trim", [1, 2])
def test_trimmed_updates_are_bounded_by_those_of_the_others(trim: int) -> None:
    rows, weights = rows_of(5), [1.0, 5.0, 2.0, 3.0, 1.5]
    rows[1] = rows[1] * np.float32(-4)
    order = np.argsort(np.array(rows), axis=0, kind="stable")
    kept = order[trim : 5 - trim]
    heavy = np.array(weights)[kept]
    wanted = (np.take_along_axis(np.array(rows, np.float64), kept, axis=0) * heavy).sum(axis=0) / heavy.sum(axis=0)
    check(summed(rows, weights, Aggregation("trimmed", trim)), wanted)
    rows[3] = rows[3] * np.float32(1e6)  # it is refused, and so one less is left out
    found = summed(rows, weights, Aggregation("trimmed", 1))
    assert list(found.refused) == ["bern"]
    left = [0, 1, 2, 4]
    check(found, weighted([rows[number] for number in left], [weights[number] for number in left]))


@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e30])
def test_norms_are_the_same_in_any_order_and_those_of_numpy(factor: float) -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(1)) * factor
    wanted = float(np.linalg.norm(values.double().numpy()))
    assert math.sqrt(steady_squared_norm(values)) == pytest.approx(wanted, rel=1e-6)
    piece = values[: 1 << 18]
    assert steady_squared_norm(piece) == steady_squared_norm(piece.flip(0)) == steady_squared_norm(piece.view(512, 512).t().contiguous())
    assert steady_squared_norm(torch.zeros(5)) == 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (IslandsOptions(outer_aggregation="trimmed"), "takes 3 sites, and there are 2"),
        (IslandsOptions(outer_trim=1), "--outer-aggregation mean leaves nothing out"),
    ],
)
def test_what_so_many_sites_cannot_do_is_refused(options: IslandsOptions, said: str) -> None:
    with pytest.raises(JobError, match=said):
        aggregation_of(options, 2)
    with pytest.raises(JobError, match="takes 3 updates for a round"):
        aggregation_of(IslandsOptions(outer_aggregation="trimmed", quorum=2), 3)


def by_hand(factor: float, how: str) -> dict[str, torch.Tensor]:
    """Three sites that join their weights after every step of SGD; the last one's samples are multiplied."""
    sites = [Site(start, stop, "sgd") for start, stop in SHARES]
    common = sites[0].row()
    for step in range(island_job.STEPS):
        weights = [site.step(step)[1] for site in sites]
        updates = [(common - site.row()).astype(np.float64) for site in sites]
        if how == "mean":
            common = common - weighted(updates[:2], weights[:2]).astype(np.float32)  # the third is refused
        else:
            order = np.argsort(np.array(updates, np.float32), axis=0, kind="stable")[1:2]
            common = common - np.take_along_axis(np.array(updates), order, axis=0)[0].astype(np.float32)
        for site in sites:
            site.take(common)
    return sites[0].model.state_dict()


@pytest.mark.parametrize(("how", "factor"), [("mean", 1000.0), ("trimmed", 3.0)])
def test_a_run_of_three_sites_refuses_or_trims_what_one_of_them_sends(
    how: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(island_job, "wild", factor)
    run, plan = tmp_path / "run", tmp_path / "p.plan"
    plan.write_text(f"{HEAD}\nstage 0: layers 0-3: o/0=4 r/0=4 k/0=2\n")
    given = ["-c", str(cluster(tmp_path / "c.toml", (1, 1, 1))), "--plan", str(plan), *ISLANDS, *EVERY_STEP]
    run_job([*given, "--outer-aggregation", how, "--out", str(run)], "sgd", island_job.STEPS, str(factor))
    found, wanted = weights_of(run, "sgd"), by_hand(factor, how)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6)
    refused = [event for event in events_of(run / "events.jsonl") if event["event"] == "peer_refused"]
    named = [(event["peer"], event["what"], event["reason"].partition(":")[0]) for event in refused]
    assert named == ([("kyiv", "update", f"round {number}") for number in range(1, island_job.STEPS + 1)] if how == "mean" else [])
