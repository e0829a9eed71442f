"""How later rounds are made, from what sites measure while they train. Asked at every round's border; what was asked for stays.

The choice in use is journaled with every round (`RoundTerms.choice`), so a coordinator that takes over goes on with it.
"""

from collections.abc import Mapping

import msgspec

from atoll.codec.registry import make_codec
from atoll.plan.modes.islands import IslandsOptions
from atoll.planner.outer_choice import OuterController, SiteLinks
from atoll.runtime.modes.islands.measured import SiteMeasured
from atoll.runtime.modes.islands.spec import RoundChoice, choose_rounds
from atoll.units import format_seconds, plural

__all__ = ["RoundAdapter"]


class RoundAdapter:
    """A pure function of what it is told, in the order it is told it."""

    def __init__(self, options: IslandsOptions, choice: RoundChoice, parameters: int) -> None:
        """`choice` is in use: the first one, or that of the last round in the journal."""
        self.choice = choice
        self._options, self._parameters = options, parameters
        self._seen: dict[str, int] = {}
        self._controller: OuterController | None = None
        self._late = 0  # how often in a row τ was another than an exchange takes

    def at_border(self, measured: Mapping[str, SiteMeasured]) -> tuple[str, ...] | None:
        """The reasons why `choice` is another one from here on; None: it stays. `measured` is what the sites that are there found last."""
        counts = {site: found.count for site, found in measured.items()}
        if len(measured) < 2 or any(self._seen.get(site) == count for site, count in counts.items()):
            return None  # not all have made another exchange since this was asked: there is nothing new to confirm anything
        self._seen = counts
        links = self._links(measured)
        if self._controller is None:
            self._controller = OuterController(links, self.choice.rung)
        before = self.choice
        reasons: tuple[str, ...] = ()
        if self._controller.observe(links) is not None:
            self._late = 0
            self.choice, reasons = choose_rounds(self._options, links)
        elif self._is_late(links):
            steps = self._delay(links)
            self.choice = msgspec.structs.replace(self.choice, delay_steps=steps)
            exchange = format_seconds(links.exchange_s(_bits(self.choice.codec)))
            reasons = (f"an exchange takes {exchange}, {plural(steps, 'step')} of {format_seconds(links.step_s)}",)
        if msgspec.structs.replace(self.choice, rung=before.rung) == before:
            return None
        return (f"as measured between {plural(len(measured), 'site')} in the last rounds", *reasons)

    def _links(self, measured: Mapping[str, SiteMeasured]) -> SiteLinks:
        """The slowest link, the longest way and the shortest step of any site."""
        return SiteLinks(
            bytes_per_s=min(found.bytes_per_s for found in measured.values()),
            round_trip_s=max(found.round_trip_s for found in measured.values()),
            step_s=min(found.step_s for found in measured.values()),
            parameters=self._parameters,
            sites=len(measured),
            frugal=self._options.frugal,
            gradients=False,
        )

    def _is_late(self, links: SiteLinks) -> bool:
        """Whether an exchange would not take τ steps on links up to a quarter faster or slower than measured, twice in a row."""
        if self._options.delay_steps is not None:
            return False
        margin = OuterController.MARGIN
        fewest, most = (self._delay(links.times(factor)) for factor in (margin, 1 / margin))
        self._late = 0 if fewest <= self.choice.delay_steps <= most else self._late + 1
        if self._late < OuterController.CONFIRMATIONS:
            return False
        self._late = 0
        return True

    def _delay(self, links: SiteLinks) -> int:
        return min(self.choice.inner_steps, links.delay_steps(_bits(self.choice.codec)))


def _bits(codec: str) -> float:
    return make_codec(codec).spec.bits or 32.0
