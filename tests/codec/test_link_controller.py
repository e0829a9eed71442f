"""The link's controller: right without noise, quick after a change, calm under noise, honest about errors."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec.link_controller import CODECS_FOR, MARGIN, Decision, LinkController, LinkState, TensorMessage, message_seconds
from atoll.codec.registry import make_codec
from atoll.errors import CodecError

GRADIENT = TensorMessage(role="gradient", nbytes=64e6)
ACTIVATION = TensorMessage(role="activation", nbytes=4e6)


def link(mbit: float, *, round_trip: float = 0.02, compute: float = 8e9) -> LinkState:
    return LinkState(bytes_per_s=mbit * 125_000, round_trip_s=round_trip, codec_bytes_per_s=compute)


def feed(controller: LinkController, states: list[LinkState], start: float = 0.0) -> list[Decision]:
    return [controller.observe(start + i, state) for i, state in enumerate(states)]


def test_fast_links_send_exactly_and_slow_ones_use_the_budget() -> None:
    assert feed(LinkController(GRADIENT), [link(200_000)])[0].codec == "none"
    assert feed(LinkController(GRADIENT), [link(20)])[0].codec == "int4"
    assert feed(LinkController(ACTIVATION), [link(20)])[0].codec == "int8"
    assert feed(LinkController(GRADIENT, error_budget=0.97), [link(1)])[0].codec.startswith("top-k")
    assert feed(LinkController(GRADIENT, error_budget=0.0), [link(1)])[0].codec == "none"


def test_little_compute_makes_codecs_unattractive() -> None:
    assert feed(LinkController(GRADIENT), [link(1000, compute=8e9)])[0].codec != "none"
    assert feed(LinkController(GRADIENT), [link(1000, compute=2e8)])[0].codec == "none"


def test_time_that_hides_behind_computing_is_spent_on_exactness() -> None:
    hidden = TensorMessage(role="gradient", nbytes=64e6, hidden_s=6.0)
    assert feed(LinkController(hidden), [link(100)])[0].codec == "none"
    assert feed(LinkController(TensorMessage(role="gradient", nbytes=64e6)), [link(100)])[0].codec == "int4"


@given(st.floats(10, 2000), st.sampled_from([0.1, 10.0]), st.sampled_from(["gradient", "activation"]), st.integers(1, 20))
def test_a_tenfold_change_is_answered_at_the_third_observation(mbit: float, factor: float, role: str, before: int) -> None:
    message = GRADIENT if role == "gradient" else ACTIVATION
    controller, fresh = LinkController(message), LinkController(message)
    feed(controller, [link(mbit)] * before)
    after = feed(controller, [link(mbit * factor)] * 6, before)
    (ideal,) = feed(fresh, [link(mbit * factor)])
    ahead = 3 if before > 1 else 4  # a window of one old observation is outvoted as late as any
    assert len({decision.codec for decision in after[ahead:]}) == 1, "settled"
    assert after[-1].message_s <= (1 + MARGIN) * 1.1 * ideal.message_s
    assert sum(decision.changed for decision in after) <= 1


@given(
    st.floats(1, 100_000), st.floats(0, 0.3), st.floats(2e8, 5e10), st.floats(0.001, 1), st.floats(0, 2),
    st.lists(st.floats(0.81, 1.24), min_size=40, max_size=40),
)  # fmt: skip
def test_noise_of_the_bandwidth_does_not_make_it_go_back_and_forth(
    mbit: float, round_trip: float, compute: float, budget: float, hidden: float, noise: list[float]
) -> None:
    controller = LinkController(TensorMessage(role="gradient", nbytes=64e6, hidden_s=hidden), error_budget=budget)
    decisions = feed(controller, [link(mbit * factor, round_trip=round_trip, compute=compute) for factor in noise])
    codecs = [decisions[0].codec, *(decision.codec for decision in decisions if decision.changed)][1:]
    assert len(codecs) == len(set(codecs)), "no codec is taken twice"
    assert len(codecs) <= 3


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_even_wild_links_change_codec_at_most_every_second_observation(factors: list[float]) -> None:
    decisions = feed(LinkController(GRADIENT), [link(100 * factor) for factor in factors])
    changes = [i for i, decision in enumerate(decisions) if decision.changed]
    assert all(b - a >= 2 for a, b in pairwise(changes))


@given(st.integers(3, 30), st.sampled_from([0.01, 100.0]))
def test_one_bad_measurement_changes_nothing(at: int, factor: float) -> None:
    states = [link(100)] * 40
    states[at] = link(100 * factor)
    assert [decision.changed for decision in feed(LinkController(GRADIENT), states)].count(True) == 1


@given(st.floats(1, 1e5), st.floats(0, 0.5), st.floats(1e8, 1e11), st.floats(0, 1), st.floats(0, 3))
def test_the_first_choice_is_the_most_exact_that_is_fast_enough(
    mbit: float, trip: float, compute: float, budget: float, hidden: float
) -> None:
    message, state = TensorMessage(role="gradient", nbytes=64e6, hidden_s=hidden), link(mbit, round_trip=trip, compute=compute)
    decision = LinkController(message, error_budget=budget).observe(0.0, state)
    specs = {text: make_codec(text).spec for text in CODECS_FOR["gradient"]}
    seconds = {
        text: message_seconds(spec, message, state) for text, spec in specs.items() if text == "none" or spec.relative_error <= budget
    }
    enough = max(hidden, 1.1 * min(seconds.values()))
    assert decision.message_s == seconds[decision.codec] <= enough
    assert specs[decision.codec].relative_error == min(specs[text].relative_error for text, taken in seconds.items() if taken <= enough)


def test_a_codec_measured_over_the_budget_is_left_at_once_and_tried_again_later() -> None:
    controller = LinkController(GRADIENT, forget_after_s=60)
    assert controller.observe(0, link(20)).codec == "int4"
    decision = controller.observe(1, link(20), {"int4": 0.5})
    assert (decision.codec, decision.changed) == ("int8", True)
    assert "int4 lost more than the budget" in decision.reason
    assert {controller.observe(t, link(20)).codec for t in range(2, 60)} == {"int8"}
    assert [controller.observe(t, link(20)).codec for t in range(62, 66)][-1] == "int4"


def test_measured_errors_open_the_strong_codecs() -> None:
    """A stated error is for values without structure; gradients with few large values may be measured to lose little."""
    decisions = [LinkController(GRADIENT).observe(0, link(5), {"top-k:0.01": 0.1})]
    assert decisions[0].codec == "top-k:0.01"


def test_reasons_name_the_codec_the_link_and_the_runner_up() -> None:
    controller = LinkController(GRADIENT)
    reason = controller.observe(0, link(20)).reason
    assert reason.startswith("int4: the first choice; 64 MB in ")
    assert "at 20 Mbit/s and 20 ms round trip" in reason
    assert "int8" in reason
    feed(controller, [link(20_000)] * 3)
    assert controller.codec != "int4"


def test_wrong_settings_and_measurements_are_refused() -> None:
    with pytest.raises(CodecError, match="must include 'none'"):
        LinkController(GRADIENT, codecs=["int8"])
    with pytest.raises(CodecError, match="error budget"):
        LinkController(GRADIENT, error_budget=-1)
    with pytest.raises(CodecError, match="positive and finite"):
        LinkController(GRADIENT).observe(0, link(0))
    with pytest.raises(CodecError, match="no codec"):
        LinkController(GRADIENT, codecs=["none", "zip"])
