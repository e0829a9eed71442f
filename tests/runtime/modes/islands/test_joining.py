"""A whole site joins a run: real processes, real TLS, against one process that trains on the samples that each round's updates have."""

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from atoll.control.journal import read_records
from atoll.control.rounds.messages import Offer, RoundCommitted, RoundRecord, SiteJoined, UpdateId
from atoll.data import Samples
from atoll.runtime.modes.islands.resume import growth_of, read_beginning
from atoll.runtime.run_directory import RunDirectory

from . import island_job
from .test_faults import events_of, notes_of, rounds_of, started
from .test_islands import ATOLL, EVERY_STEP, check_equal, run_job, weights_of

pytestmark = pytest.mark.timeout(300)
SAMPLES = 3
PARTS = {"oslo": (0, 5), "rome": (5, 10), "kyiv": (10, 10 + SAMPLES)}


def join_command(log: str, out: Path) -> list[str]:
    """As the run tells it."""
    line = next(line for line in log.splitlines() if "joins with: atoll join " in line)
    given = line.partition("atoll join ")[2].replace("--site NAME", "").split()
    return [*ATOLL, "join", *given, "--site", "kyiv", "--samples", str(SAMPLES), "--out", str(out)]


def positions(batch: int, site: str, joined: SiteJoined) -> range:
    """Of a site's samples of a batch in the endless row: by hand."""
    begin = batch * island_job.BATCH + max(0, batch - joined.first) * SAMPLES
    return range(begin + PARTS[site][0], begin + PARTS[site][1])


def one_process(rounds: list[list[range]]) -> tuple[list[float], dict[str, Tensor]]:
    """The samples of every round as one batch, in a loop as anybody writes it."""
    model: nn.Module = deepcopy(island_job.job.build_model("cpu"))
    optimizer = island_job.OPTIMIZERS["sgd"](model.parameters())
    losses = []
    for parts in rounds:
        rows = [island_job.data[island_job.job.samples.index(place)] for part in parts for place in part]
        batch: Any = [torch.stack(column) for column in zip(*rows, strict=True)]
        total, weight = island_job.loss(model, batch)
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append(float(total.detach() / weight))
    return losses, model.state_dict()


@contextmanager
def joined_by_kyiv(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", "subprocess.Popen[str]", Path]]:
    """A run with the file that lets it go on, and a site that has joined it."""
    run, allowed, log = tmp_path / "run", tmp_path / "allowed", tmp_path / "log"
    allowed.write_text("2")
    with started(tmp_path, str(allowed), "--equal-steps", *EVERY_STEP) as (process, until):
        until(lambda: len(rounds_of(run)) == 2)
        with (tmp_path / "joined").open("w") as out:
            joining = subprocess.Popen(join_command(log.read_text(), tmp_path / "kyiv"), stdout=out, stderr=out, text=True)
        try:
            until(lambda: joining.poll() is not None or "Waiting for the end of the round" in (tmp_path / "joined").read_text())
            allowed.write_text("6")
            own = tmp_path / "kyiv" / "sites" / "kyiv"
            until(lambda: joining.poll() is not None or any("this site goes on after" in said for said in notes_of(own)))
            yield process, joining, allowed
        finally:
            joining.kill()


def records_of(journal: Path) -> list[RoundRecord]:
    return list(read_records(journal.read_bytes(), msgspec.json.Decoder(RoundRecord))[0])


def parts_of(records: list[RoundRecord], base: dict[str, int], joined: SiteJoined, rounds: int = 1 << 30) -> list[list[range]]:
    """The samples of each of the first rounds."""
    commits = [record for record in records if isinstance(record, RoundCommitted) and record.round < rounds]
    return [
        [
            positions(base[offer.update.site] + step, offer.update.site, joined)
            for offer in record.named
            for step in range(offer.first, offer.last)
        ]
        for record in commits
    ]


def test_a_run_that_is_stopped_stops_the_site_that_joined_and_goes_on_without_it(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    with joined_by_kyiv(tmp_path) as (process, joining, allowed):
        process.send_signal(signal.SIGINT)
        while process.poll() is None and "every site stops after its step" not in log.read_text():
            time.sleep(0.02)
        allowed.write_text(str(10**6))
        assert process.wait() == 130, log.read_text()
        assert joining.wait() == 0, (tmp_path / "joined").read_text()
    run_job(["--resume", str(run), "--mode", "islands", "--equal-steps", *EVERY_STEP], "sgd", 20)
    before = records_of(next(run.glob("journal-before-*.jsonl")))
    joined = next(record for record in before if isinstance(record, SiteJoined))
    beginning = read_beginning(RunDirectory(run))
    assert beginning.mark is not None
    rounds = parts_of(before, {"oslo": 0, "rome": 0, "kyiv": joined.first}, joined, beginning.mark.position[1])
    (since, more), (until, less) = beginning.growth
    assert (since, more, less) == (joined.first, SAMPLES, -SAMPLES)
    for record in records_of(run / "journal.jsonl"):  # each site goes on where the checkpoint has it
        if isinstance(record, RoundCommitted):
            batches = [(offer.update.site, beginning.bases[offer.update.site] + offer.first) for offer in record.named]
            begins = [batch * island_job.BATCH + SAMPLES * (max(0, batch - since) - max(0, batch - until)) for _, batch in batches]
            rounds.append([range(begin + PARTS[site][0], begin + PARTS[site][1]) for (site, _), begin in zip(batches, begins, strict=True)])
    taken = [place for parts in rounds for part in parts for place in part]
    assert len(set(taken)) == len(taken)  # no sample counts twice
    found = weights_of(run, "sgd")
    for name, value in one_process(rounds)[1].items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_site_that_joins_trains_on_samples_of_its_own_and_no_sample_counts_twice(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    with joined_by_kyiv(tmp_path) as (process, joining, allowed):
        allowed.write_text(str(10**6))
        assert process.wait() == 0, log.read_text()
        assert joining.wait() == 0, (tmp_path / "joined").read_text()
    records = records_of(run / "journal.jsonl")
    (joined,) = [record for record in records if isinstance(record, SiteJoined)]
    assert (joined.site, joined.samples) == ("kyiv", SAMPLES)
    assert f"kyiv takes part from step {joined.first + 1} on" in (tmp_path / "joined").read_text()
    rounds = parts_of(records, {"oslo": 0, "rome": 0, "kyiv": joined.first}, joined)
    counted = Counter(place for parts in rounds for part in parts for place in part)
    whole = joined.first * island_job.BATCH + (island_job.STEPS - joined.first) * (island_job.BATCH + SAMPLES)
    assert set(counted.values()) == {1}  # no sample counts twice
    missing = set(range(whole)) - counted.keys()  # where a round was made before it was there
    last = [place for step in range(joined.first, island_job.STEPS) for place in positions(step, "kyiv", joined)]
    assert missing < set(last)
    assert counted.keys() <= set(range(whole))
    check_equal(run, "sgd", *one_process(rounds))
    notes = [event["message"] for event in events_of(run / "events.jsonl") if event["event"] == "note"]
    assert f"kyiv joins: from step {joined.first + 1} on batches have 13 samples, the last 3 of them its own" in notes


def test_batches_that_grow_and_shrink_again_leave_no_sample_out_and_none_twice() -> None:
    """By `resume.py`'s words: rome was the furthest, kyiv had come to batch 8, when the run was started again without kyiv."""
    joined = [SiteJoined("kyiv", 3, 6), SiteJoined("bern", 2, 11)]
    offer = Offer(UpdateId("kyiv", 1, 1), 0, 3, 0, 2, 1.0, "d")
    growth = growth_of(joined, {"oslo": 7, "rome": 9}, {"kyiv": offer})
    assert growth == ((6, 3), (11, -3), (11, 2), (11, -2))
    assert growth_of([], {"oslo": 7}, {}) == ()
    whole = Samples(range(1000), list, 0, 10)
    sites = [whole.share(0, 4), whole.share(4, 10)]
    for site in sites:
        for since, more in growth_of(joined[:1], {"oslo": 7, "rome": 9}, {"kyiv": offer}):
            site.grow(since, more)
    taken = [place for site in sites for step in range(12) for place in site.positions(step)]
    assert len(set(taken)) == len(taken)
    own = [60 + 10 + 13 * number + place for number in range(3) for place in range(3)]  # kyiv's of batches 6 to 8
    assert set(range(12 * 10 + 9)) - set(taken) == set(own)


def test_samples_that_were_asked_for_stay_where_they_were() -> None:
    share = Samples(range(1000), list, 0, 10).share(0, 4)
    assert list(share.positions(5)) == [50, 51, 52, 53]
    with pytest.raises(AssertionError):
        share.grow(5, 3)
    share.grow(6, 3)
    assert [share.positions(step).start for step in (5, 6, 7, 8)] == [50, 60, 73, 86]
