"""Is a peer alive, slow, stopped, unreachable or dead? A judgement from when it was last heard; no clocks and no sockets here.

| state | what is seen |
|---|---|
| alive | heart-beats come in time |
| slow | it is heard, but late: heart-beats or their answers were overdue, or calls are |
| stopped | nothing is heard, yet its kernel acknowledges what it is sent: the process stands still (SIGSTOP, a debugger, swapping) |
| unreachable | nothing is heard and nothing acknowledged: the network is cut, or the machine is off; TCP_USER_TIMEOUT ends it |
| dead | the connection ended: its process exited, the kernel reset it, or it was cut for too long |
"""

from typing import Literal, TypeAlias

import msgspec

__all__ = ["Detector", "LivenessRule", "PeerState", "Verdict"]

PeerState: TypeAlias = Literal["alive", "slow", "stopped", "unreachable", "dead"]


class LivenessRule(msgspec.Struct, frozen=True, kw_only=True):
    """When lateness counts, in heart-beats of the peer."""

    heartbeat_seconds: float = 1.0
    late_beats: float = 2.5
    silent_beats: float = 6.0
    forgive_beats: float = 8.0  # in time again for so long: no longer slow


class Verdict(msgspec.Struct, frozen=True):
    """A state and why."""

    state: PeerState
    reason: str


class Detector:
    """Watches one connection. The peer promises a heart-beat every `heartbeat_seconds`."""

    def __init__(self, rule: LivenessRule, now: float) -> None:
        self.rule = rule
        self.last_heard = now
        self.overdue_calls = 0  # calls that take longer than they should but have not failed
        self._late_until = now
        self._late_reason = ""
        self._ended: str | None = None

    def heard(self, now: float) -> None:
        """Bytes arrived."""
        gap = now - self.last_heard
        if gap > self.rule.late_beats * self.rule.heartbeat_seconds:
            self._late(now, f"nothing was heard for {gap:.3g} s")
        self.last_heard = now

    def answered(self, now: float, round_trip_seconds: float) -> None:
        """A ping was answered."""
        if round_trip_seconds > self.rule.late_beats * self.rule.heartbeat_seconds:
            self._late(now, f"a heart-beat took {round_trip_seconds:.3g} s to be answered")

    def ended(self, reason: str) -> None:
        """The connection is gone."""
        self._ended = reason

    def judge(self, now: float, acknowledged: bool | None) -> Verdict:
        """The state now. `acknowledged`: whether the peer's kernel answers; None where the carrier cannot tell."""
        if self._ended is not None:
            return Verdict("dead", self._ended)
        silence, beat = now - self.last_heard, self.rule.heartbeat_seconds
        if silence > self.rule.silent_beats * beat:
            text = f"nothing was heard for {silence:.3g} s, with a heart-beat promised every {beat:.3g} s"
            if acknowledged is False:
                return Verdict("unreachable", f"{text}; what it is sent is not acknowledged")
            return Verdict("stopped", text if acknowledged is None else f"{text}; its kernel acknowledges what it is sent")
        if silence > self.rule.late_beats * beat:
            return Verdict("slow", f"nothing was heard for {silence:.3g} s")
        if now < self._late_until:
            return Verdict("slow", self._late_reason)
        if self.overdue_calls:
            return Verdict("slow", f"{self.overdue_calls} calls take longer than their like did")
        return Verdict("alive", "heart-beats come in time")

    def _late(self, now: float, reason: str) -> None:
        self._late_until = now + self.rule.forgive_beats * self.rule.heartbeat_seconds
        self._late_reason = reason
