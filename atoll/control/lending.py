"""Lending: a worker's state for those who join, chunk by chunk; and over a commit what they need to finish and make the step themselves."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from atoll.control.catching_up import DONORS, ENOUGH
from atoll.control.messages import FetchState, Message, PullSum, Round, StateChunk, SumChunk
from atoll.control.standing import Standing

__all__ = ["Lending"]

EARLY_LIMIT = 4096


class _Past:
    """What is kept of a step: the state before it, and the sums it was made with."""

    __slots__ = ("position", "round", "state", "sums")

    def __init__(self, position: tuple[int, int, int], round: Round, state: Any, sums: Mapping[int, Mapping[int, Any]]) -> None:
        self.position = position  # epoch, version, stage
        self.round = round
        self.state = state
        self.sums = sums  # by number of the sum, and chunk


class Lending:
    """One donor."""

    def __init__(self, at: Standing, send: Callable[[str, Message], None]) -> None:
        self._given: dict[str, set[int]] = {}  # chunks of this version, by who fetches it
        self._asked_for_past = False
        self._at = at
        self._send = send
        self._past: _Past | None = None
        self._early: deque[FetchState] = deque(maxlen=EARLY_LIMIT)

    @property
    def wanted(self) -> bool:
        """Whether somebody may want the state over the next commit: one that catches up, or has enough of it by then.

        A donor gives a share of the chunks only.
        """
        enough = ENOUGH * self._at.settings.chunks / DONORS
        return self._asked_for_past or any(len(chunks) >= enough for chunks in self._given.values())

    def remember(self, position: tuple[int, int, int], round: Round, kept: Any, sums: Mapping[int, Mapping[int, Any]]) -> None:
        """A step was made; `kept` is the state before it, None where nobody wants it."""
        self._past = _Past(position, round, kept, sums) if kept is not None else None
        self._given, self._asked_for_past = {}, False

    def forget(self) -> None:
        """The state is given up."""
        self._past = None
        self._given, self._asked_for_past = {}, False

    def on_fetch(self, fetch: FetchState) -> None:
        """A chunk of exactly the version asked for: this one, the one before it, or one this worker is about to have."""
        at, past = self._at, self._past
        if fetch.stage != at.stage:
            return
        if past is not None and past.position == (fetch.epoch, fetch.version, fetch.stage):
            self._asked_for_past = True
            chunk = at.compute.read_kept(past.state, fetch.chunk)
            self._send(fetch.worker, StateChunk(fetch.nonce, *past.position, fetch.chunk, chunk))
            return
        ahead = at.checks.fetch_version and (fetch.epoch, fetch.version) > (at.epoch, at.version)
        if at.changing or ahead:
            self._early.append(fetch)
            return
        if at.state is None or (at.checks.fetch_version and (fetch.epoch, fetch.version) != (at.epoch, at.version)):
            return
        self._given.setdefault(fetch.worker, set()).add(fetch.chunk)
        self._send(fetch.worker, StateChunk(fetch.nonce, *at.position, fetch.chunk, at.compute.read_chunk(at.state, fetch.chunk)))

    def answer_early(self) -> None:
        """There is a new state."""
        early, self._early = self._early, deque(maxlen=EARLY_LIMIT)
        for fetch in early:
            self.on_fetch(fetch)

    def on_pull_sum(self, pull: PullSum) -> bool:
        """Gives a sum of the step before; False where it is not about that."""
        past = self._past
        if past is None or (past.round, *past.position[:2]) != (pull.round, pull.epoch, pull.version):
            return False
        self._asked_for_past = True
        kept = past.sums.get(pull.stage, {}).get(pull.chunk)
        if kept is not None:
            self._send(pull.worker, SumChunk(past.round, pull.epoch, pull.version, pull.stage, pull.chunk, kept))
        return True
