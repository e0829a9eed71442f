"""How rounds are made of what was asked for and what the links say."""

import msgspec
import pytest

from atoll.control.rounds import RoundTerms
from atoll.errors import JobError
from atoll.plan.modes.islands import IslandsOptions
from atoll.planner.outer_choice import GRADIENTS_WAIT, SiteLinks, choose_outer
from atoll.runtime.modes.islands.spec import RoundChoice, choose_exchange, choose_rounds

LINKS = SiteLinks(bytes_per_s=12.5e6, round_trip_s=0.02, step_s=0.2, parameters=10_000_000, sites=2, gradients=False)


def test_what_is_not_asked_for_is_chosen_from_the_links() -> None:
    choice, reasons = choose_rounds(IslandsOptions(outer_momentum=0.5), LINKS)
    links = choose_outer(LINKS)
    assert (choice.inner_steps, choice.delay_steps, choice.codec) == (links.inner_steps, links.delay_steps, links.codec)
    assert (choice.momentum, choice.learning_rate) == (0.5, links.learning_rate)
    assert reasons == (*links.reasons, "as asked for: outer momentum")


def test_few_inner_steps_have_no_momentum_unless_it_is_asked_for() -> None:
    assert choose_rounds(IslandsOptions(inner_steps=2), LINKS)[0].momentum == 0.0
    assert choose_rounds(IslandsOptions(inner_steps=2, outer_momentum=0.9), LINKS)[0].momentum == 0.9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (IslandsOptions(inner_steps=3, delay_steps=4), "--delay-steps 4: an update must be there before the next one"),
        (IslandsOptions(outer_codec="int5"), "--outer-codec: there is no codec 'int5'"),
    ],
)
def test_what_means_nothing_is_refused(options: IslandsOptions, said: str) -> None:
    with pytest.raises(JobError, match=said):
        choose_rounds(options, LINKS)


def test_a_choice_survives_the_words_of_a_round() -> None:
    choice, _ = choose_rounds(IslandsOptions(), LINKS)
    assert RoundChoice.of(choice.terms()) == choice
    assert isinstance(choice.terms(), RoundTerms)


FAST = SiteLinks(bytes_per_s=125e6, round_trip_s=0.001, step_s=0.2, parameters=10_000_000, sites=2)


def test_gradients_are_exchanged_where_the_links_carry_them_behind_the_backward_pass() -> None:
    choice, reasons = choose_exchange(IslandsOptions(), FAST, None)
    assert (choice.exchange, choice.codec, choice.inner_steps, choice.delay_steps) == ("gradients", choose_outer(FAST).codec, 1, 0)
    assert GRADIENTS_WAIT in reasons
    given = IslandsOptions(inner_steps=1, delay_steps=0, outer_codec="int4")
    assert choose_exchange(given, FAST, None)[0].codec == "int4"
    assert choose_exchange(given, FAST, None)[0].exchange == "gradients"
    assert choose_exchange(IslandsOptions(equal_steps=True, adapt=False), FAST, None)[0].exchange == "gradients"


@pytest.mark.parametrize(
    ("options", "links", "why_not"),
    [
        (IslandsOptions(), LINKS, None),
        (IslandsOptions(), FAST, "parts of the model"),
        (IslandsOptions(), None, None),
        (IslandsOptions(exchange="weights"), FAST, None),
        (IslandsOptions(frugal=True), msgspec.structs.replace(FAST, frugal=True), None),
        (IslandsOptions(quorum=1), FAST, None),
        (IslandsOptions(adapt=True), FAST, None),
        (IslandsOptions(noise_multiplier=1.0, clip_norm=1.0), FAST, None),
        (IslandsOptions(outer_aggregation="clipped"), FAST, None),
        (IslandsOptions(inner_steps=2), FAST, None),
        (IslandsOptions(outer_codec="none"), FAST, None),
    ],
)
def test_else_weights_are(options: IslandsOptions, links: SiteLinks | None, why_not: str | None) -> None:
    choice, reasons = choose_exchange(options, links, why_not)
    assert choice.exchange == "weights"
    assert GRADIENTS_WAIT not in reasons


def test_gradients_that_are_asked_for_wait_for_links_that_are_too_slow() -> None:
    choice, reasons = choose_exchange(IslandsOptions(exchange="gradients"), LINKS, None)
    assert (choice.exchange, choice.codec) == ("gradients", "int4")
    assert any("every step waits for the links" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("options", "why_not", "said"),
    [
        (
            IslandsOptions(exchange="gradients"),
            "the ranks have parts",
            "--exchange gradients: the ranks have parts; use --exchange weights",
        ),
        (IslandsOptions(exchange="gradients", quorum=1), None, "there is no outer update, so leave out --quorum"),
        (IslandsOptions(exchange="gradients", inner_steps=2), None, "there is no outer update, so leave out --inner-steps"),
        (IslandsOptions(exchange="gradients", outer_codec="top-k-2-bit:64"), None, "gradients every step are sent as none, bf16, int8"),
    ],
)
def test_gradients_with_what_belongs_to_outer_updates_are_refused(options: IslandsOptions, why_not: str | None, said: str) -> None:
    with pytest.raises(JobError, match=said):
        choose_exchange(options, FAST, why_not)
