"""Which codec each link of a collective uses: fixed, or adapted by a controller per link to the rates measured. Decisions are events."""

import math
from collections import deque
from collections.abc import Callable, Sequence

from atoll.codec.base import Codec, Role
from atoll.codec.link_controller import LinkController, LinkState, TensorMessage
from atoll.codec.registry import make_codec
from atoll.events import CodecChosen, Observer
from atoll.fabric.deadline import LinkEstimate

__all__ = ["FED_BACK_CODECS", "SUMMED_CODECS", "AdaptiveCodecs", "BusyRate", "FixedCodecs", "LinkCodecs", "RateWindow"]

_BIN_SECONDS = 0.05
_WINDOW_BINS = 8
_RECENT_SECONDS = 1.0
_NO_SECONDS, _FILLED_SECONDS = 0.0015, 1.0
_SAMPLE_SECONDS, _SAMPLE_BYTES = 0.05, 2_000_000


class RateWindow:
    """The highest rate over 0.4 s among transfers that ran at the same time: what the interface can do, once something filled it.

    A transfer's bytes count evenly over its time. Each round the peak is forgotten a little, so that a link that got slower is believed.
    """

    def __init__(self) -> None:
        self.bytes_seen = 0  # in all
        self._bins: dict[int, float] = {}
        self._rounds: deque[float] = deque(maxlen=8)

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0: nothing measured yet."""
        return max(self._rounds, default=0.0)

    def add(self, begin: float, end: float, nbytes: int) -> None:
        """Bytes that travelled between two times."""
        self.bytes_seen += nbytes
        first, last = int(begin / _BIN_SECONDS), max(int(begin / _BIN_SECONDS), int(end / _BIN_SECONDS))
        if last - first > 400:
            return  # it stood still most of the time, which says nothing of the interface
        length = max(end - begin, 1e-9)
        for bin_ in range(first, last + 1):
            inside = min(end, (bin_ + 1) * _BIN_SECONDS) - max(begin, bin_ * _BIN_SECONDS)
            self._bins[bin_] = self._bins.get(bin_, 0.0) + (nbytes * inside / length if last > first else nbytes)

    def end_round(self) -> None:
        """A round is over: its peak counts for the next eight, ten per cent less each time it is not reached again."""
        peak = 0.0
        for bin_ in self._bins:
            total = sum(self._bins.get(bin_ + offset, 0.0) for offset in range(_WINDOW_BINS))
            peak = max(peak, total / (_WINDOW_BINS * _BIN_SECONDS))
        self._bins.clear()
        self._rounds = deque((0.9 * before for before in self._rounds), maxlen=8)
        if peak:
            self._rounds.append(peak)


class BusyRate:
    """The throughput of one link: bytes over the time in which some were on their way, of the last second. Transfers may overlap.

    Where less than a sample went in that second, older transfers count too. A transfer that took no time went into buffers and says nothing
    of the link, unless all do: then the link is faster than what is sent.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._filled_at = -math.inf  # when buffers were last seen to be full
        self._transfers: deque[tuple[float, float, int]] = deque()  # when each ended, the time that only it was busy, bytes
        self._busy_seconds, self._bytes = 0.0, 0

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0: too little was measured yet."""
        return self._bytes / max(self._busy_seconds, 1e-6) if self._enough(self._busy_seconds, self._bytes) else 0.0

    def add(self, begin: float, end: float, nbytes: int) -> None:
        """A transfer ended."""
        busy = max(0.0, end - max(begin, self._until))
        self._until = max(self._until, end)
        if end - begin >= _NO_SECONDS:
            self._filled_at = end
        elif end - self._filled_at < _FILLED_SECONDS:
            return
        self._transfers.append((end, busy, nbytes))
        self._busy_seconds += busy
        self._bytes += nbytes
        while self._transfers[0][0] < end - _RECENT_SECONDS:
            _, busy, nbytes = self._transfers[0]
            if not self._enough(self._busy_seconds - busy, self._bytes - nbytes):
                break
            self._transfers.popleft()
            self._busy_seconds -= busy
            self._bytes -= nbytes

    @staticmethod
    def _enough(busy_seconds: float, nbytes: int) -> bool:
        return nbytes >= _SAMPLE_BYTES or (busy_seconds >= _SAMPLE_SECONDS and nbytes > 0)


SUMMED_CODECS = ("none", "bf16", "int8", "int4")
"""What a sum may be sent as by itself."""

FED_BACK_CODECS = (*SUMMED_CODECS, "top-k:0.1", "top-k:0.03", "top-k:0.01", "top-k:0.003")
"""What a sum may be sent as with error feedback."""

_ALL = "all receivers"
_OBSERVE_SECONDS = 0.25
_UNKNOWN_CODEC_BYTES_PER_S = 8e9  # a plain copy on one core, until encoding was timed


class LinkCodecs:
    """How chunks are encoded."""

    needs_feedback = False  # some of them leave out so much that only error feedback makes up for it

    def towards(self, peer: str) -> Codec:
        """For what goes to one peer."""
        raise NotImplementedError

    def for_all(self, peers: Sequence[str]) -> Codec:
        """For what is encoded once and goes to all of these."""
        raise NotImplementedError

    def timed(self, codec: Codec, nbytes: int, seconds: float) -> None:
        """Encoding so many bytes took so long."""

    def sent(self, peer: str, begin: float, end: float, nbytes: int) -> None:
        """So many bytes went to a peer between two times."""


class FixedCodecs(LinkCodecs):
    """One codec for everything."""

    def __init__(self, codec: str = "int8") -> None:
        self._codec = make_codec(codec)
        self.needs_feedback = _need_feedback((codec,))

    def towards(self, peer: str) -> Codec:
        """The fixed one."""
        return self._codec

    def for_all(self, peers: Sequence[str]) -> Codec:
        """The fixed one."""
        return self._codec


class AdaptiveCodecs(LinkCodecs):
    """A LinkController for each link, fed with what the fabric measures of it; and one for results, which go by the slowest link.

    Chunks say themselves how they are encoded, so a link changes its codec between two chunks, in the middle of a round.
    `nbytes` is what a link carries in a round; `first` is used until a link was measured. `codecs` are chosen from: with `FED_BACK_CODECS`,
    and an error budget that allows them, rounds need error feedback. `hidden_seconds` of those bytes' way nobody waits for, as computing
    goes on: the most exact codec that is done by then is taken.
    """

    def __init__(
        self,
        estimate: Callable[[str], LinkEstimate | None],
        clock: Callable[[], float],
        observer: Observer | None = None,
        *,
        role: Role = "gradient",
        nbytes: float = 4e6,
        error_budget: float | None = None,
        first: str = "int8",
        codecs: Sequence[str] = SUMMED_CODECS,
        hidden_seconds: float = 0.0,
    ) -> None:
        self.needs_feedback = _need_feedback((first, *codecs))
        self._choice = tuple(codecs)
        self._estimate, self._clock, self._observer = estimate, clock, observer
        self._message = TensorMessage(role=role, nbytes=nbytes, hidden_s=hidden_seconds)
        self._error_budget, self._first = error_budget, first
        self._controllers: dict[str, LinkController] = {}
        self._observed: dict[str, float] = {}
        self._codecs: dict[str, Codec] = {}
        self._rates: dict[str, BusyRate] = {}
        self._codec_bytes_per_s = _UNKNOWN_CODEC_BYTES_PER_S

    def towards(self, peer: str) -> Codec:
        """What the link's controller says now."""
        return self._decide(peer, [peer])

    def for_all(self, peers: Sequence[str]) -> Codec:
        """What the controller of the slowest link would say."""
        return self._decide(_ALL, peers)

    def timed(self, codec: Codec, nbytes: int, seconds: float) -> None:
        """Encoding is about half of a codec's work; what it took says how much memory rate is left to codecs here."""
        passes = codec.spec.memory_passes / 2
        if passes and seconds > 0:
            self._codec_bytes_per_s += 0.1 * (passes * nbytes / seconds - self._codec_bytes_per_s)

    def sent(self, peer: str, begin: float, end: float, nbytes: int) -> None:
        """Chunks tell the throughput of their link sooner than heart-beats do."""
        self._rates.setdefault(peer, BusyRate()).add(begin, end, nbytes)

    def _decide(self, link: str, peers: Sequence[str]) -> Codec:
        now = self._clock()
        state = self._slowest(peers)
        if state is not None and now - self._observed.get(link, -1.0) >= _OBSERVE_SECONDS:
            self._observed[link] = now
            self._observe(link, now, state)
        return self._codecs.get(link) or self._codecs.setdefault(link, make_codec(self._first))

    def _slowest(self, peers: Sequence[str]) -> LinkState | None:
        """Of the links to these peers that were measured."""
        found = [(rate, peer) for peer in peers if (rate := self._rate(peer)) > 0]
        if not found:
            return None
        rate, peer = min(found)
        estimate = self._estimate(peer)
        round_trip = estimate.latency_seconds if estimate is not None else 0.0  # queues are what the rate tells of
        return LinkState(bytes_per_s=rate, round_trip_s=round_trip, codec_bytes_per_s=self._codec_bytes_per_s)

    def _rate(self, peer: str) -> float:
        measured = self._rates.get(peer)
        if measured is not None and measured.bytes_per_s:
            return measured.bytes_per_s
        estimate = self._estimate(peer)
        return estimate.outgoing_bytes_per_s if estimate is not None else 0.0

    def _observe(self, link: str, now: float, state: LinkState) -> None:
        controller = self._controllers.get(link)
        if controller is None:
            controller = LinkController(self._message, codecs=self._choice, error_budget=self._error_budget)
            self._controllers[link] = controller
        before = controller.codec
        decision = controller.observe(now, state)
        if decision.changed:
            self._codecs[link] = make_codec(decision.codec)
            if self._observer is not None:
                event = CodecChosen(at_seconds=now, link=link, codec=decision.codec, before=before or "", reason=decision.reason)
                self._observer(event)


def _need_feedback(codecs: Sequence[str]) -> bool:
    return any(text.startswith("top-k") for text in codecs)
