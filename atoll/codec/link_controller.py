"""LinkController: which codec a link uses now, and why. Pure: no clock, no I/O; times and measurements are arguments.

The rule: the smallest error among codecs that are fast enough, and fast enough is what hides behind computing, or what comes within a
tenth of the fastest. The link is the median of the last three observations, and a change must be asked for twice in a row: a tenfold drop
or recovery is answered at the third observation, a single bad measurement never. A codec is left only when it is a margin too slow, and a
more exact one is taken only when it is that margin faster than needed. Between the two nothing changes, so noise of the bandwidth smaller
than (1 + margin)² (1.56 from the lowest to the highest) cannot make the choice go back and forth.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from atoll.codec import CodecSpec
from atoll.codec.base import Role
from atoll.codec.registry import make_codec
from atoll.errors import CodecError
from atoll.units import format_bytes, format_rate, format_seconds

__all__ = ["CODECS_FOR", "MARGIN", "Decision", "LinkController", "LinkState", "TensorMessage", "message_seconds"]

CODECS_FOR: Mapping[Role, tuple[str, ...]] = {
    "activation": ("none", "bf16", "int8", "int4"),
    "parameter": ("none", "bf16", "int8"),
    "gradient": ("none", "bf16", "int8", "int4", "top-k:0.1", "top-k:0.03", "top-k:0.01", "top-k:0.003"),
}
"""Sparse codecs leave so much out that only error feedback makes up for it, and only gradients may come late."""

ERROR_BUDGETS: Mapping[Role, float] = {"activation": 0.01, "parameter": 0.002, "gradient": 0.2}
"""Relative errors allowed where the user says nothing: int8 for activations, bf16 for parameters, int4 with feedback for gradients."""


class TensorMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What a link carries again and again."""

    role: Role
    nbytes: float  # in memory
    element_bytes: float = 4.0
    hidden_s: float = 0.0  # how long a message may take without anybody waiting for it, because computing goes on meanwhile


class LinkState(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a link and of the compute beside it."""

    bytes_per_s: float
    round_trip_s: float
    codec_bytes_per_s: float  # memory rate left to codecs on the slower of the two hosts

    def valid(self) -> bool:
        """Whether these are numbers one can decide by."""
        return 0 < self.bytes_per_s < math.inf and 0 <= self.round_trip_s < math.inf and 0 < self.codec_bytes_per_s < math.inf


def message_seconds(spec: CodecSpec, message: TensorMessage, link: LinkState) -> float:
    """From the start of encoding to the end of decoding, one step after the other: chunks of a large message may overlap them."""
    wire = message.nbytes * spec.ratio(message.element_bytes) / link.bytes_per_s
    return link.round_trip_s / 2 + wire + spec.memory_passes * message.nbytes / link.codec_bytes_per_s


_WINDOW = 3
_CONFIRMATIONS = 2
_NEAR_FASTEST = 1.1
MARGIN = 0.25  # how much too slow a codec must be to be left, how much faster than needed a more exact one to be taken


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The codec to use from now on, whether that is a change, the predicted time of a message and the reason in words."""

    codec: str
    changed: bool
    message_s: float
    reason: str


class LinkController:
    """Chooses for one link and one kind of message. Give it every observation of the link in order; use the codec it answers with.

    `error_budget` bounds the relative error (root mean square). What codecs state counts until an error was measured; a measured one
    counts for `forget_after_s`, after which a codec that was too coarse gets another chance.
    """

    def __init__(
        self,
        message: TensorMessage,
        *,
        codecs: Sequence[str] | None = None,
        error_budget: float | None = None,
        forget_after_s: float = 120.0,
    ) -> None:
        self.message = message
        self.error_budget = ERROR_BUDGETS[message.role] if error_budget is None else error_budget
        self.forget_after_s = forget_after_s
        self.codec: str | None = None
        self._specs = {text: make_codec(text).spec for text in (CODECS_FOR[message.role] if codecs is None else codecs)}
        self._recent: deque[LinkState] = deque(maxlen=_WINDOW)
        self._errors: dict[str, tuple[float, float]] = {}  # codec → (error, when it was measured)
        self._asked: tuple[str, int] = ("", 0)  # the change under consideration and how often in a row it was
        self._check()

    def observe(self, at_s: float, link: LinkState, errors: Mapping[str, float] | None = None) -> Decision:
        """What was measured just now, with errors by codec where measured (`ErrorFeedback.relative_error`).

        A codec measured to be over the budget is left at once; other changes wait for a second observation that asks for them.
        """
        if not link.valid():
            raise CodecError(f"a link cannot be judged by {link}: rates must be positive and finite")
        self._recent.append(link)
        for codec, error in (errors or {}).items():
            self._errors[codec] = (error, at_s)
        state = self._median()
        seconds = {codec: message_seconds(spec, self.message, state) for codec, spec in self._specs.items()}
        allowed = self._allowed(at_s)
        enough = max(self.message.hidden_s, _NEAR_FASTEST * min(seconds[codec] for codec in allowed))
        wanted, why = self._wanted(seconds, allowed, enough)
        changed = self._agreed(wanted, at_once=self.codec not in allowed)
        if changed:
            self.codec = wanted
        assert self.codec is not None
        reason = self._told(why if changed else "kept", state, seconds, allowed)
        return Decision(codec=self.codec, changed=changed, message_s=seconds[self.codec], reason=reason)

    def _check(self) -> None:
        if "none" not in self._specs:
            raise CodecError("a link's codecs must include 'none': it is what is left when errors pass the budget")
        if not (self.error_budget >= 0 and self.message.nbytes > 0 and self.message.element_bytes > 0):
            raise CodecError(
                "a link's controller needs an error budget of at least 0 and messages of some bytes; "
                f"got {self.error_budget} and {self.message}"
            )

    def _median(self) -> LinkState:
        return LinkState(
            bytes_per_s=statistics.median(link.bytes_per_s for link in self._recent),
            round_trip_s=statistics.median(link.round_trip_s for link in self._recent),
            codec_bytes_per_s=statistics.median(link.codec_bytes_per_s for link in self._recent),
        )

    def error(self, codec: str, at_s: float) -> float:
        """The relative error that counts for a codec now: measured not long ago, or else stated."""
        error, measured_at = self._errors.get(codec, (0.0, 0.0))
        fresh = codec in self._errors and at_s - measured_at <= self.forget_after_s
        return error if fresh else self._specs[codec].relative_error

    def _allowed(self, at_s: float) -> dict[str, float]:
        """Codecs within the budget with their errors. One measured but not in use must keep a margin."""
        errors = {codec: self.error(codec, at_s) for codec in self._specs}
        return {
            codec: error
            for codec, error in errors.items()
            if codec == "none" or error <= self.error_budget / (1 if codec == self.codec or codec not in self._errors else 1 + MARGIN)
        }

    def _wanted(self, seconds: Mapping[str, float], allowed: Mapping[str, float], enough: float) -> tuple[str, str]:
        def most_exact(limit: float) -> str | None:
            quick = [codec for codec in allowed if seconds[codec] <= limit]
            return min(quick, key=lambda codec: (allowed[codec], seconds[codec]), default=None)

        best = most_exact(enough)
        assert best is not None, "the fastest is always fast enough"
        if self.codec is None:
            return best, "the first choice"
        if self.codec not in allowed:
            return best, f"{self.codec} lost more than the budget of {self.error_budget:.3g}"
        if seconds[self.codec] > (1 + MARGIN) * enough:
            return best, f"{self.codec} takes {format_seconds(seconds[self.codec])}"
        easier = most_exact(enough / (1 + MARGIN))
        if easier is not None and allowed[easier] < allowed[self.codec]:
            return easier, f"the link has room for a smaller error than {self.codec}'s"
        return self.codec, ""

    def _agreed(self, wanted: str, at_once: bool) -> bool:
        """Whether to change now: a wish counts when it was there at the observation before, whatever codec it was for."""
        if wanted == self.codec:
            self._asked = ("", 0)
            return False
        self._asked = (wanted, self._asked[1] + 1)
        if not at_once and self._asked[1] < _CONFIRMATIONS:
            return False
        self._asked = ("", 0)
        return True

    def _told(self, why: str, state: LinkState, seconds: Mapping[str, float], allowed: Mapping[str, float]) -> str:
        assert self.codec is not None
        others = sorted((codec for codec in allowed if codec != self.codec), key=lambda codec: seconds[codec])
        beside = f", {others[0]} {format_seconds(seconds[others[0]])}" if others else ""
        return (
            f"{self.codec}: {why}; {format_bytes(self.message.nbytes)} in {format_seconds(seconds[self.codec])}{beside} "
            f"at {format_rate(state.bytes_per_s)} and {format_seconds(state.round_trip_s)} round trip"
        )
