"""How rounds are made of what was asked for and what the links say."""

import pytest

from atoll.control.rounds import RoundTerms
from atoll.errors import JobError
from atoll.plan.modes.islands import IslandsOptions
from atoll.planner.outer_choice import SiteLinks, choose_outer
from atoll.runtime.modes.islands.spec import RoundChoice, choose_rounds

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
