"""How sites train together over a slow link: which algorithm, H, τ, codec, η and μ. Pure; says why.

While a step of t seconds is computed, a link of B bytes a second carries a = 0.85·8·B·t/(N·f) bits for each of N parameters. f is how often
an update passes the link: 1 for two sites, M − 1 where each of M sites gets the updates of all others. What fits is taken, in this order:

1. gradients every step, in as few bits as need be (H = 1, τ = 0), where they hide behind the backward pass and the round trip is short;
2. an outer update every H steps in int4, whose exchange overlaps computing and is applied τ steps later: H as large as makes τ a quarter of
   it, at least 20 and at most 100, since a delay costs more than a larger H does; then as many steps of delay as need be, up to H;
3. the same in 2 bits, then the 64th part of the values in 2 bits, of these at H up to 500.

Where even the last does not fit, it is taken and the links are what the run waits for: the choice says so. More bandwidth never gives a
larger H. Quantities beside H come from `docs/islands.md`, where the trials and publications are that they rest on.
"""

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from atoll.codec import CodecSpec, codec_spec, sparse_two_bit_spec
from atoll.errors import AtollError
from atoll.units import format_bytes, format_rate, format_seconds, plural

__all__ = ["InnerOptimizer", "OuterChoice", "OuterController", "SiteLinks", "choose_outer"]

InnerOptimizer: TypeAlias = Literal["adamw", "muon"]

USED = 0.85  # of a link's measured rate
HIDDEN_GRADIENTS = 0.6  # of a step: the backward pass, behind which gradients are sent
SHORT_ROUND_TRIP = 0.1  # of a step, which every step would wait; in the trials outer updates took 14% more steps and up
GRADIENTS_WAIT = (
    "every step waits for the gradients of all sites, the slowest too; a site that dies sends all of them back to the last checkpoint"
)
GRADIENT_CODECS = ("none", "bf16", "int8", "int4", "2-bit")
OUTER_CODECS = (codec_spec("int4"), codec_spec("2-bit"), sparse_two_bit_spec(64))
FEWEST, MANY, MOST = 20, 100, 500  # inner steps of a round
_NO_WAIT = 1e-6  # of a round: what is longer by no more is as long


class SiteLinks(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice is made from: the slowest link of any site, its own steps, and the model."""

    bytes_per_s: float
    round_trip_s: float
    step_s: float  # of the site whose step is shortest: its updates are due first
    parameters: int  # that are trained
    sites: int
    optimizer: InnerOptimizer = "adamw"
    frugal: bool = False  # bytes cost more than time
    gradients: bool = True  # they may be exchanged every step

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "step_s", "parameters"):
            if not 0 < getattr(self, name) < math.inf:
                raise AtollError(f"sites that train together: {name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.round_trip_s < math.inf:
            raise AtollError(f"sites that train together: round_trip_s must be at least 0, got {self.round_trip_s}")
        if self.sites < 2:
            raise AtollError(f"an outer update needs two sites or more, got {self.sites}")

    @property
    def passes(self) -> int:
        """f: how often an update's bytes pass the link of a site."""
        return self.sites - 1

    @property
    def bits_a_step(self) -> float:
        """a: bits for each parameter that the link carries in a step."""
        return USED * 8 * self.bytes_per_s * self.step_s / (self.parameters * self.passes)

    def exchange_s(self, bits: float) -> float:
        """How long updates of so many bits a parameter take."""
        return bits / self.bits_a_step * self.step_s + self.round_trip_s

    def delay_steps(self, bits: float) -> int:
        """After how many steps they are there."""
        return math.ceil(self.exchange_s(bits) / self.step_s)

    def times(self, factor: float) -> "SiteLinks":
        """With links that are so much faster."""
        return msgspec.structs.replace(self, bytes_per_s=self.bytes_per_s * factor)


class OuterChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How sites train together from the next round on."""

    algorithm: Literal["gradients", "outer"]
    inner_steps: int  # H
    delay_steps: int  # τ
    codec: str
    learning_rate: float  # η
    momentum: float  # μ
    bytes_a_step: float  # that leave a site, on average
    utilisation: float  # of the devices: what is computing, of a step's time
    reasons: tuple[str, ...]

    @property
    def rung(self) -> tuple[int, int]:
        """Where it stands in the order of choices: smaller for faster links."""
        names = [spec.name for spec in OUTER_CODECS]
        number = GRADIENT_CODECS.index(self.codec) if self.algorithm == "gradients" else len(GRADIENT_CODECS) + names.index(self.codec)
        return number, self.inner_steps


def choose_outer(links: SiteLinks) -> OuterChoice:
    """The first that fits; where none does, the one with the fewest bytes."""
    if links.frugal:
        return _outer(links, OUTER_CODECS[-1], _fitting(links, OUTER_CODECS[-1], MANY, 1.0) or MOST)
    for codec in GRADIENT_CODECS if links.gradients else ():
        if _gradients_fit(links, codec):
            return _gradients(links, codec)
    for spec, most, share in _rungs():
        steps = _fitting(links, spec, most, share)
        if steps is not None:
            return _outer(links, spec, steps)
    return _outer(links, OUTER_CODECS[-1], MOST)


def _gradient_bits(codec: str) -> float:
    return codec_spec(codec).bits or 32.0


def _gradients_fit(links: SiteLinks, codec: str) -> bool:
    hidden = _gradient_bits(codec) <= HIDDEN_GRADIENTS * links.bits_a_step
    return hidden and links.round_trip_s <= SHORT_ROUND_TRIP * links.step_s


def _rungs() -> Iterator[tuple[CodecSpec, int, float]]:
    """(codec, most inner steps, most of them that an exchange may take), from fast links to slow ones."""
    yield OUTER_CODECS[0], MANY, 0.25
    yield OUTER_CODECS[0], MANY, 1.0
    yield OUTER_CODECS[1], MANY, 1.0
    yield OUTER_CODECS[2], MOST, 1.0


def _fitting(links: SiteLinks, spec: CodecSpec, most: int, share: float) -> int | None:
    """The fewest inner steps of which an exchange takes at most this share, or None where that is more than `most`.

    Where it may take all of them, a round is not shorter than where it may take a quarter: the delay is a smaller part of it then.
    """
    needed = max(FEWEST, math.ceil(links.exchange_s(spec.bits) / (share * links.step_s)))
    if needed > most:
        return None
    return needed if share < 1 else max(needed, MANY)


def _gradients(links: SiteLinks, codec: str) -> OuterChoice:
    bits = _gradient_bits(codec)
    exposed = links.round_trip_s
    reasons = (
        _room(links),
        f"gradients of {bits:g} bits every step: they hide behind the backward pass, and a round trip is"
        f" {links.round_trip_s / links.step_s:.0%} of a step",
        GRADIENTS_WAIT,
    )
    return OuterChoice(
        algorithm="gradients", inner_steps=1, delay_steps=0, codec=codec, learning_rate=1.0, momentum=0.0,
        bytes_a_step=bits / 8 * links.parameters * links.passes, utilisation=links.step_s / (links.step_s + exposed), reasons=reasons,
    )  # fmt: skip


def _outer(links: SiteLinks, spec: CodecSpec, steps: int) -> OuterChoice:
    exchange = links.exchange_s(spec.bits)
    delay = links.delay_steps(spec.bits)
    trained = steps * links.step_s
    waited = exchange - trained if exchange > trained * (1 + _NO_WAIT) else 0.0
    learning_rate, momentum = _outer_rates(links)
    reasons = [_room(links), _why_no_gradients(links)]
    reasons.append(
        f"an update of {spec.bits:.3g} bits every {steps} steps: its exchange takes {format_seconds(exchange)},"
        f" {exchange / links.step_s:.1f} steps"
    )
    if waited:
        reasons.append(f"even so the exchange is longer than a round: every round waits {format_seconds(waited)} for the links")
    return OuterChoice(
        algorithm="outer", inner_steps=steps, delay_steps=min(steps, delay), codec=spec.name, learning_rate=learning_rate,
        momentum=momentum, bytes_a_step=spec.bits / 8 * links.parameters * links.passes / steps,
        utilisation=trained / (trained + waited), reasons=tuple(reasons),
    )  # fmt: skip


def _outer_rates(links: SiteLinks) -> tuple[float, float]:
    """(η, μ) at large H, which grow with the number of sites: DiLoCo's published best for AdamW inside, MuLoCo's for Muon."""
    doublings = math.log2(links.sites)
    if links.optimizer == "muon":
        return round(min(1.0, 0.7 + 0.075 * doublings), 2), round(min(0.9, 0.6 + 0.075 * doublings), 2)
    return round(min(0.8, 0.6 + 0.1 * max(0.0, doublings - 2)), 2), 0.9


def _room(links: SiteLinks) -> str:
    return (
        f"{format_rate(links.bytes_per_s)} between {plural(links.sites, 'site')} carry {links.bits_a_step:.3g} bits a parameter"
        f" ({format_bytes(4.0 * links.parameters)} of weights) in a step of {format_seconds(links.step_s)}"
    )


def _why_no_gradients(links: SiteLinks) -> str:
    if not links.gradients:
        return "gradients every step are not exchanged in this run: an outer update is made instead"
    if links.frugal:
        return "bytes cost more than time here: the fewest bytes are chosen, not the fewest steps"
    if links.round_trip_s > SHORT_ROUND_TRIP * links.step_s:
        return f"gradients every step would wait for a round trip of {format_seconds(links.round_trip_s)} each"
    return f"gradients every step would need {_gradient_bits(GRADIENT_CODECS[-1]) / HIDDEN_GRADIENTS:.3g} of these bits at least"


class OuterController:
    """Keeps a choice while it is about as good as the newest one: asked at round borders, where all sites can change together.

    It changes when the choice at hand is none of those for links up to a quarter faster or slower than measured, twice in a row. So noise
    below a factor of 1.56 from lowest to highest changes nothing, and a single bad measurement never does.
    """

    MARGIN = 1.25
    CONFIRMATIONS = 2

    def __init__(self, links: SiteLinks, rung: tuple[int, int] | None = None) -> None:
        """`rung` is that of a choice which is in use already; by default it is the one that these links give."""
        self.choice = choose_outer(links)
        self._rung = self.choice.rung if rung is None else rung
        self._asked = 0

    def observe(self, links: SiteLinks) -> OuterChoice | None:
        """The choice to change to at this border, with its reasons; None: it stays."""
        faster, slower = choose_outer(links.times(self.MARGIN)), choose_outer(links.times(1 / self.MARGIN))
        if faster.rung <= self._rung <= slower.rung:
            self._asked = 0
            return None
        self._asked += 1
        if self._asked < self.CONFIRMATIONS:
            return None
        self._asked = 0
        self.choice = choose_outer(links)
        self._rung = self.choice.rung
        return self.choice
