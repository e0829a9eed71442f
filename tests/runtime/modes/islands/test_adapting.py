"""Rounds are made as links and steps measured meanwhile ask for; a run whose terms change is the formula with the same changes."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.control.journal import read_records
from atoll.control.rounds.messages import RoundCommitted, RoundRecord, UpdateChunk, UpdateId
from atoll.plan.modes.islands import IslandsOptions
from atoll.planner.outer_choice import SiteLinks, choose_outer
from atoll.runtime.modes.islands.adapting import RoundAdapter
from atoll.runtime.modes.islands.chunks import packed
from atoll.runtime.modes.islands.measured import FetchMeter, SiteMeasured, StepClock, chunk_bytes
from atoll.runtime.modes.islands.spec import RoundChoice, choose_rounds

from .test_faults import events_of
from .test_islands import ISLANDS, Site, check_equal, cluster, run_job

PARAMETERS = 10_000_000
UPDATE = UpdateId("oslo", 1, 1)


def links(megabits: float, step_s: float = 0.2) -> SiteLinks:
    return SiteLinks(bytes_per_s=megabits * 1e6 / 8, round_trip_s=0.02, step_s=step_s, parameters=PARAMETERS, sites=2, gradients=False)


def adapter(megabits: float, **given: Any) -> RoundAdapter:
    """In use is what links as predicted ask for."""
    options = IslandsOptions(**given)
    return RoundAdapter(options, choose_rounds(options, links(megabits))[0], PARAMETERS)


def found(count: int, megabits: float, step_s: float = 0.2) -> dict[str, SiteMeasured]:
    """What two sites say: one of them has a faster link and longer steps."""
    slow = SiteMeasured(count=count, bytes_per_s=megabits * 1e6 / 8, round_trip_s=0.01, step_s=step_s)
    return {"oslo": slow, "rome": SiteMeasured(count=count, bytes_per_s=1e12, round_trip_s=0.02, step_s=9.0)}


def test_a_choice_changes_when_two_exchanges_in_a_row_say_so_and_tells_why() -> None:
    adapting = adapter(100.0)
    assert (adapting.choice.inner_steps, adapting.choice.codec) == (20, "int4")
    asked = [adapting.at_border(found(count, megabits)) for count, megabits in enumerate((5.0, 100.0, 5.0))]
    assert asked == [None] * 3
    assert adapting.at_border(found(2, 5.0)) is None  # the same exchange says nothing twice
    assert adapting.at_border({"oslo": found(9, 5.0)["oslo"]}) is None  # one site has no link
    reasons = adapting.at_border(found(3, 5.0))
    assert reasons is not None
    assert reasons[0] == "as measured between 2 sites in the last rounds"
    wanted = choose_outer(links(5.0))
    assert reasons[1:] == wanted.reasons
    assert (adapting.choice.inner_steps, adapting.choice.delay_steps) == (wanted.inner_steps, wanted.delay_steps) != (20, 5)


def test_what_was_asked_for_stays_and_the_rest_follows() -> None:
    adapting = adapter(100.0, inner_steps=30, outer_codec="int8", outer_momentum=0.5)
    assert adapting.choice.delay_steps == links(100.0).delay_steps(make_codec("int8").spec.bits or 0)
    for count in range(2):
        adapting.at_border(found(count, 1.0))
    choice = adapting.choice
    assert (choice.inner_steps, choice.codec, choice.momentum, choice.delay_steps) == (30, "int8", 0.5, 30)
    everything = adapter(100.0, inner_steps=30, outer_codec="int8", delay_steps=3)
    assert [everything.at_border(found(count, 0.01)) for count in range(6)] == [None] * 6


def test_the_delay_alone_follows_where_the_rest_is_as_it_should_be() -> None:
    adapting = adapter(300.0)
    assert adapting.choice.inner_steps == 20
    assert adapting.choice.delay_steps == 1
    assert adapting.at_border(found(0, 110.0)) is None
    reasons = adapting.at_border(found(1, 110.0))
    assert reasons is not None
    assert "3 steps of 200 ms" in reasons[1]
    assert (adapting.choice.inner_steps, adapting.choice.delay_steps) == (20, 3)


def test_a_coordinator_in_anothers_place_goes_on_with_the_choice_in_the_journal() -> None:
    """Also where links changed meanwhile it is confirmed first."""
    options = IslandsOptions()
    choice = RoundChoice.of(choose_rounds(options, links(100.0))[0].terms())
    adapting = RoundAdapter(options, choice, PARAMETERS)
    assert [adapting.at_border(found(count, 90.0)) for count in range(4)] == [None] * 4
    assert adapting.at_border(found(4, 5.0)) is None
    assert adapting.at_border(found(5, 5.0)) is not None


def test_a_fetch_is_measured_from_its_first_question_to_its_last_answer() -> None:
    meter = FetchMeter(patience_seconds=5.0)
    assert meter.bytes_per_s(0.1) is None
    for chunk in range(3):
        meter.asked(UPDATE, chunk, 10.0)
    meter.came(UPDATE, 0, 100, 10.5)
    meter.asked(UPDATE, 3, 10.5)
    for chunk in (1, 2, 3):
        assert meter.count == 0
        meter.came(UPDATE, chunk, 100, 11.0)
    assert meter.count == 1
    assert meter.bytes_per_s(0.2) == pytest.approx(400 / 0.8)
    assert meter.bytes_per_s(0.9) == pytest.approx(400 / 0.5)  # hardly more than a round trip
    meter.came(UPDATE, 7, 100, 12.0)  # nobody asked
    assert meter.count == 1


def test_a_fetch_in_which_something_was_lost_says_nothing() -> None:
    meter = FetchMeter(patience_seconds=5.0)
    meter.asked(UPDATE, 0, 0.0)
    meter.asked(UPDATE, 1, 0.0)
    meter.came(UPDATE, 1, 100, 1.0)
    meter.asked(UPDATE, 0, 5.0)  # again
    meter.came(UPDATE, 0, 100, 6.0)
    assert meter.count == 0
    meter.asked(UPDATE, 2, 10.0)  # never answered
    meter.asked(UPDATE, 3, 20.0)
    meter.came(UPDATE, 3, 100, 20.5)
    assert (meter.count, meter.last) == (1, (100, 0.5))


def test_the_bytes_of_a_chunk_are_those_of_its_numbers_and_its_header() -> None:
    payload = packed(make_codec("none").encode(torch.ones(10)))
    assert chunk_bytes(UpdateChunk(UPDATE, 0, payload)) == 40 + len(payload[0])


def test_one_long_step_says_nothing_of_the_others() -> None:
    clock = StepClock()
    assert clock.median == 0
    for seconds in (9.0, 0.1, 0.2):
        clock.add(seconds)
    assert clock.median == 0.2


def formula_of_rounds(choices: list[RoundChoice], optimizer: str, total: int) -> tuple[list[float], dict[str, Tensor]]:
    """The outer update by hand, each round with its own terms; nothing is lost by encoding."""
    sites = [Site(0, 5, optimizer), Site(5, 10, optimizer)]
    common, moving = sites[0].row(), np.zeros(len(sites[0].row()), np.float32)
    losses, weights, began, sent, sent_at = [], np.zeros(2), 0, None, 0
    left = list(choices)
    for step in range(1, total + 1):
        made = [site.step(step - 1) for site in sites]
        losses.append(sum(loss for loss, _ in made) / sum(weight for _, weight in made))
        weights += [weight for _, weight in made]
        while True:
            choice = left[0] if left else None
            if sent is not None and choice is not None and (step >= sent_at + choice.delay_steps or step == total):
                rows, shares = sent
                mean = sum(share * (common - row) for share, row in zip(shares, rows, strict=True)).astype(np.float32)
                moving = np.float32(choice.momentum) * moving + mean
                common = common - np.float32(choice.learning_rate) * (mean + np.float32(choice.momentum) * moving)
                for site, row in zip(sites, rows, strict=True):
                    site.take(common + (site.row() - row))
                began, sent = sent_at, None
                left.pop(0)
            elif sent is None and choice is not None and step > began and (step >= began + choice.inner_steps or step == total):
                sent, sent_at = ([site.row() for site in sites], weights / weights.sum()), step
                weights = np.zeros(2)
                if step < sent_at + choice.delay_steps and step != total:
                    break
            else:
                break
    assert not left
    sites[0].take(common)
    return losses, sites[0].model.state_dict()


def choices_of(run: Path) -> list[RoundChoice]:
    """Of every round, from the journal."""
    records = read_records((run / "journal.jsonl").read_bytes(), msgspec.json.Decoder(RoundRecord))[0]
    return [RoundChoice.of(record.terms) for record in records if isinstance(record, RoundCommitted)]


@pytest.mark.timeout(300)
def test_a_run_whose_terms_change_on_the_way_is_the_formula_with_the_same_changes(tmp_path: Path) -> None:
    """The cluster file tells of links that are far slower, against a step, than those to the same machine are."""
    run, steps = tmp_path / "run", 400
    given = ["-c", str(cluster(tmp_path / "c.toml", (1, 1))), *ISLANDS, "--adapt", "--outer-codec", "none", "--inner-steps", "40"]
    run_job([*given, "--out", str(run)], "sgd", steps=steps)
    choices = choices_of(run)
    changed = [event for event in events_of(run / "events.jsonl") if event["event"] == "outer_chosen"][1:]
    assert changed
    for event in changed:  # it is told as it was done
        now, before = choices[event["round"] - 1], choices[event["round"] - 2]
        assert (now.inner_steps, now.delay_steps) == (event["inner_steps"], event["delay_steps"])
        assert now != before
        assert event["reasons"][0] == "as measured between 2 sites in the last rounds"
    assert {choice.codec for choice in choices} == {"none"}
    check_equal(run, "sgd", *formula_of_rounds(choices, "sgd", steps))
