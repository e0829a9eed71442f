"""Noised updates of a real run are the formula's, with noise of the size asked for; what they cost is as dp-accounting tells it."""

import json
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from atoll.cli.main import run as atoll
from atoll.errors import AtollError, JobError
from atoll.plan.modes.islands import IslandsOptions
from atoll.runtime.modes.islands.noise import Noise, check_noise, noise_of, read_noise
from atoll.runtime.modes.islands.site_noise import SiteNoise
from atoll.runtime.run_directory import RunDirectory

from . import island_job
from .test_faults import events_of
from .test_islands import EVERY_STEP, ISLANDS, Site, cluster, losses_of, run_job, weights_of

pytestmark = pytest.mark.timeout(300)
STEPS, CLIP, MULTIPLIER = island_job.STEPS, 0.05, 1e-3
NOISED = ["--noise-multiplier", str(MULTIPLIER), "--clip-norm", str(CLIP), "--target-delta", "1e-5"]


def by_hand() -> tuple[list[float], "np.ndarray[tuple[int], np.dtype[np.float64]]", float]:
    """Without noise: the first site's losses, the common weights, and the share of a number's noise that is in them."""
    sites = [Site(0, 5, "sgd"), Site(5, 10, "sgd")]
    common, losses, share = sites[0].row().astype(np.float64), [], 0.0
    for step in range(STEPS):
        made = [site.step(step) for site in sites]
        weights = np.array([weight for _, weight in made])
        losses.append(made[0][0] / made[0][1])
        updates = [common - site.row().astype(np.float64) for site in sites]
        updates = [update * min(1.0, CLIP / float(np.linalg.norm(update))) for update in updates]
        common = common - np.average(updates, axis=0, weights=weights)
        share += float(((weights / weights.sum()) ** 2).sum())
        for site in sites:
            site.take(common.astype(np.float32))
    return losses, common, share


def test_a_runs_updates_are_clipped_and_noised_and_its_report_tells_what_that_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise that is small, so that training goes as without it."""
    run = tmp_path / "run"
    run_job(["-c", str(cluster(tmp_path / "c.toml", (1, 1))), *ISLANDS, *EVERY_STEP, *NOISED, "--out", str(run)], "sgd")
    losses, wanted, share = by_hand()
    weights = weights_of(run, "sgd")
    found = np.concatenate([weights[name].numpy().ravel() for name in sorted(weights)])
    rest, expected = found - wanted, MULTIPLIER * CLIP * share**0.5
    assert rest.std() == pytest.approx(expected, rel=0.2)
    assert np.abs(rest).max() < 6 * expected
    assert losses_of(run) == pytest.approx(losses, rel=1e-3)  # the first site's, which it alone knows
    rounds = [event for event in events_of(run / "events.jsonl") if event["event"] == "round_finished"]
    assert [[site["steps"] for site in event["sites"]] for event in rounds] == [[1, 1]] * STEPS
    assert not any("losses" in offer and offer["losses"] for offer in offers_of(run))
    records = {site: read_noise(RunDirectory(run), site) for site in ("oslo", "rome")}
    assert [record.drawn for record in records.values() if record is not None] == [STEPS, STEPS]
    assert len({record.key for record in records.values() if record is not None}) == 2
    assert stat.S_IMODE((run / "sites" / "rome" / "noise.json").stat().st_mode) == 0o600
    pytest.importorskip("dp_accounting")
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    def told() -> dict[str, dict[str, float | None]]:
        assert atoll(["report", str(run), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["privacy"]  # type: ignore[no-any-return]

    for site in told().values():
        assert (site["updates"], site["delta"], site["clip_norm"]) == (STEPS, 1e-5, CLIP)
        bound = RdpAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(MULTIPLIER), STEPS)).get_epsilon(1e-5)
        assert site["epsilon_rdp"] == pytest.approx(bound, rel=1e-6)
        assert site["epsilon_pld"] is None  # no privacy to speak of
    record = records["rome"]
    assert record is not None
    usual = msgspec.structs.replace(record, noise=Noise(norm=1.0, multiplier=2.0, delta=1e-6))
    (run / "sites" / "rome" / "noise.json").write_bytes(msgspec.json.encode(usual))
    reference = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(2.0), STEPS)).get_epsilon(1e-6)
    assert told()["rome"]["epsilon_pld"] == pytest.approx(reference, rel=1e-3)


def offers_of(run: Path) -> list[dict[str, object]]:
    """All that the journal names."""
    lines = [json.loads(line.partition(" ")[2]) for line in (run / "journal.jsonl").read_text("utf-8").splitlines()]
    found = [offer for line in lines for offer in line.get("named", [])]
    assert len(found) == 2 * STEPS
    return found


def test_what_was_noised_stays_counted_and_an_update_made_again_is_the_same(tmp_path: Path) -> None:
    directory, noise = RunDirectory(tmp_path), Noise(norm=1.0, multiplier=2.0, delta=1e-6)
    (tmp_path / "sites" / "oslo").mkdir(parents=True)
    shards = [torch.ones(700), torch.zeros(300)]
    first = SiteNoise(directory, "oslo", noise)
    sent = first.noised("a", shards)
    record = read_noise(directory, "oslo")
    assert record is not None
    assert record.drawn == 1
    again = SiteNoise(directory, "oslo", noise)  # started again
    assert all(map(torch.equal, again.noised("a", shards), sent))
    other = again.noised("b", shards)
    assert not torch.equal(other[0], sent[0])
    found = read_noise(directory, "oslo")
    assert found is not None
    assert (found.key, found.drawn) == (record.key, 3)  # what cannot be known to be the same is counted again
    (tmp_path / "sites" / "oslo" / "noise.json").write_text("{")
    with pytest.raises(AtollError, match="cannot read which updates were noised"):
        SiteNoise(directory, "oslo", noise)


def test_a_run_that_goes_on_is_noised_as_before(tmp_path: Path) -> None:
    directory, noise = RunDirectory(tmp_path), Noise(norm=1.0, multiplier=2.0, delta=1e-6)
    check_noise(directory, noise, ["oslo", "rome"])
    (tmp_path / "islands.json").write_text("{}")
    with pytest.raises(JobError, match="sites have sent updates without noise in this run"):
        check_noise(directory, noise, ["oslo", "rome"])
    (tmp_path / "sites" / "rome").mkdir(parents=True)
    SiteNoise(directory, "rome", noise)
    check_noise(directory, noise, ["oslo", "rome"])
    for other in (None, Noise(norm=1.0, multiplier=1.0, delta=1e-6)):
        with pytest.raises(JobError, match="site 'rome' has sent 0 updates with --noise-multiplier 2 --clip-norm 1"):
            check_noise(directory, other, ["oslo", "rome"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (IslandsOptions(noise_multiplier=1.0), "give --clip-norm too"),
        (IslandsOptions(clip_norm=1.0), "give --noise-multiplier too"),
        (IslandsOptions(target_delta=1e-5), "no update is noised"),
        (IslandsOptions(noise_multiplier=0.0, clip_norm=1.0), "both must be positive"),
        (IslandsOptions(noise_multiplier=1.0, clip_norm=1.0, target_delta=1.0), "more than 0 and less than 1"),
    ],
)
def test_what_means_nothing_is_refused(options: IslandsOptions, said: str) -> None:
    with pytest.raises(JobError, match=said):
        noise_of(options)
