"""How sites train together: what is chosen fits the link, and more bandwidth never makes rounds longer."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec import codec_spec
from atoll.codec.registry import make_codec
from atoll.errors import AtollError
from atoll.planner.outer_choice import MOST, OuterChoice, OuterController, SiteLinks, choose_outer

LINKS = st.builds(
    SiteLinks,
    bytes_per_s=st.floats(1e3, 1e11),
    round_trip_s=st.floats(0.0, 0.5),
    step_s=st.floats(1e-3, 1e2),
    parameters=st.integers(1_000, 10**12),
    sites=st.integers(2, 16),
    optimizer=st.sampled_from(["adamw", "muon"]),
    frugal=st.booleans(),
)


def links(megabits: float = 100.0, **rest: Any) -> SiteLinks:
    fields: dict[str, Any] = {"round_trip_s": 0.02, "step_s": 0.5, "parameters": 35_000_000, "sites": 2, **rest}
    return SiteLinks(bytes_per_s=megabits * 1e6 / 8, **fields)


def bits(choice: OuterChoice) -> float:
    return make_codec(choice.codec).spec.bits or 32.0


@given(LINKS)
def test_what_is_chosen_fits_the_link_or_says_that_the_run_waits(given_links: SiteLinks) -> None:
    choice = choose_outer(given_links)
    exchange = bits(choice) * given_links.parameters * given_links.passes / (0.85 * 8 * given_links.bytes_per_s) + given_links.round_trip_s
    if choice.algorithm == "gradients":
        assert (choice.inner_steps, choice.delay_steps, choice.learning_rate, choice.momentum) == (1, 0, 1.0, 0.0)
        assert exchange - given_links.round_trip_s <= 0.6 * given_links.step_s * (1 + 1e-9)
    else:
        assert 1 <= choice.delay_steps <= choice.inner_steps <= MOST
        waits = exchange > choice.inner_steps * given_links.step_s * (1 + 1e-6)
        assert waits == any("waits" in reason for reason in choice.reasons) == (choice.utilisation < 1)
        assert not waits or (choice.inner_steps == MOST and choice.codec == "top-k-2-bit:64")
        if not waits:
            assert choice.delay_steps == math.ceil(exchange / given_links.step_s * (1 - 1e-12))
    assert choice.bytes_a_step == pytest.approx(bits(choice) / 8 * given_links.parameters * given_links.passes / choice.inner_steps)
    assert 0 < choice.utilisation <= 1
    assert choice.reasons


def test_what_is_longer_than_a_round_by_rounding_alone_is_no_wait() -> None:
    choice = choose_outer(SiteLinks(bytes_per_s=66636016501.0, round_trip_s=0.5, step_s=0.001, parameters=1000, sites=2))
    assert choice.utilisation == 1
    assert not any("waits" in reason for reason in choice.reasons)


@given(LINKS, st.floats(1.0, 1e4))
def test_more_bandwidth_never_gives_longer_rounds_or_fewer_bytes(given_links: SiteLinks, factor: float) -> None:
    slower = choose_outer(given_links)
    faster = choose_outer(msgspec.structs.replace(given_links, bytes_per_s=given_links.bytes_per_s * factor))
    assert faster.inner_steps <= slower.inner_steps
    assert faster.bytes_a_step >= slower.bytes_a_step * (1 - 1e-9)
    assert faster.rung <= slower.rung
    assert faster.utilisation >= slower.utilisation - 1e-9 or faster.algorithm == "gradients"


@given(LINKS, st.floats(1.0, 100.0))
def test_a_longer_way_never_gives_shorter_rounds(given_links: SiteLinks, factor: float) -> None:
    farther = msgspec.structs.replace(given_links, round_trip_s=given_links.round_trip_s * factor)
    assert choose_outer(farther).inner_steps >= choose_outer(given_links).inner_steps


@given(LINKS)
def test_frugal_sends_no_more_bytes(given_links: SiteLinks) -> None:
    frugal, quick = (choose_outer(msgspec.structs.replace(given_links, frugal=frugal)) for frugal in (True, False))
    assert frugal.bytes_a_step <= quick.bytes_a_step * (1 + 1e-9)


@pytest.mark.parametrize(
    ("given_links", "algorithm", "codec", "steps"),
    [
        (links(100_000.0), "gradients", "none", 1),
        (links(2_000.0), "gradients", "int8", 1),
        (links(600.0), "gradients", "int4", 1),
        (links(300.0), "gradients", "2-bit", 1),
        (links(300.0, round_trip_s=0.2), "outer", "int4", 20),
        (links(100.0), "outer", "int4", 20),
        (links(20.0), "outer", "int4", 69),
        (links(5.0), "outer", "int4", 100),
        (links(2.0), "outer", "2-bit", 100),
        (links(0.5), "outer", "top-k-2-bit:64", 100),
        (links(0.1, parameters=10**9), "outer", "top-k-2-bit:64", 500),
        (links(100.0, frugal=True), "outer", "top-k-2-bit:64", 100),
    ],
)
def test_from_fast_links_to_slow_ones(given_links: SiteLinks, algorithm: str, codec: str, steps: int) -> None:
    choice = choose_outer(given_links)
    assert (choice.algorithm, choice.codec, choice.inner_steps) == (algorithm, codec, steps)


def test_rates_are_those_of_the_publications_at_long_rounds() -> None:
    found = [choose_outer(links(1.0, sites=sites, optimizer=optimizer)) for optimizer in ("adamw", "muon") for sites in (2, 4, 8, 16)]
    assert [each.learning_rate for each in found] == [0.6, 0.6, 0.7, 0.8, 0.77, 0.85, 0.92, 1.0]
    assert [each.momentum for each in found] == [0.9, 0.9, 0.9, 0.9, 0.67, 0.75, 0.82, 0.9]


def test_frugal_links_carry_over_a_thousandth_of_plain_gradients_bytes() -> None:
    choice = choose_outer(links(frugal=True))
    assert 4 * 35_000_000 / choice.bytes_a_step > 1000
    assert any("bytes cost more" in reason for reason in choice.reasons)


def noisy(low: float, high: float, times: int = 200) -> list[SiteLinks]:
    """Links that go back and forth between the two."""
    return [links(low if number % 3 else high) for number in range(times)]


@given(st.floats(0.5, 10_000.0))
def test_noise_below_a_factor_of_one_and_a_half_changes_nothing_after_it_settled(megabits: float) -> None:
    controller = OuterController(links(megabits))
    changes = [controller.observe(each) for each in noisy(megabits * 0.85, megabits * 1.2)]
    assert changes == [None] * len(changes)


def test_one_bad_measurement_changes_nothing_and_a_slower_link_does_at_the_second_border() -> None:
    controller = OuterController(links(600.0))
    assert controller.observe(links(6.0)) is None
    assert controller.observe(links(600.0)) is None
    assert controller.observe(links(6.0)) is None
    changed = controller.observe(links(6.0))
    assert changed is not None
    assert changed == controller.choice == choose_outer(links(6.0))
    assert [controller.observe(links(600.0)) for _ in range(2)] == [None, choose_outer(links(600.0))]


@pytest.mark.parametrize("wrong", [{"bytes_per_s": 0.0}, {"step_s": -1.0}, {"round_trip_s": float("nan")}, {"sites": 1}, {"parameters": 0}])
def test_links_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AtollError, match=r"positive|at least 0|two sites"):
        msgspec.structs.replace(links(), **wrong)


def test_the_sparse_codec_states_what_it_states_without_pytorch() -> None:
    assert codec_spec("2-bit") == make_codec("2-bit").spec
    assert make_codec("top-k-2-bit:64").spec.bits == pytest.approx(0.2266, rel=1e-3)
