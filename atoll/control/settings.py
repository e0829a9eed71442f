"""Settings: the numbers of a swarm that everybody in it shares."""

import msgspec

__all__ = ["BACKWARD_WORK", "Settings"]

BACKWARD_WORK = 2.5
"""A backward counts as so many forwards (SWARM, ICML 2023)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a swarm trains and how patient it is. Times are starting points: time-outs adapt to what is measured.

    `work` is what a micro-batch costs on each stage, in any common unit; empty means that all stages cost the same.
    """

    stages: int
    micro_batches: int  # of a step
    steps: int  # the run is over when so many are committed
    chunks: int = 1  # a stage's state and gradient travel in so many parts
    work: tuple[float, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()  # sets of stages that share parameters: their gradients are summed over all of the set
    heartbeat_seconds: float = 0.5
    silent_beats: int = 4  # a peer not heard, or that has not heard us, for so many beats is not used
    forget_seconds: float = 600.0  # and after so long it is nobody
    gather_seconds: float = 2.0  # a new coordinator listens so long before it decides
    patience_seconds: float = 10.0  # before anything was measured
    lost_seconds: float = 12.0  # a stage nobody can continue for so long is lost
    hold_seconds: float = 6.0  # a commit waits so long for a joiner's next chunk
    hold_limit_seconds: float = 60.0  # and so long for one joiner in all
    ban_seconds: float = 10.0
    checkpoint_every: int = 0  # steps; 0: as often as it is worth what it costs
    evaluate_every: int = 0  # steps, after which a state is stored in any case; 0: none
    state_quota: tuple[int, ...] = ()  # bytes that a stored state of each stage has at most; empty: no limit
    max_norm: float | None = None  # gradients of larger norm are clipped
    skips_overflows: bool = True  # a step whose gradient is not finite is passed over, as fp16 needs it; otherwise the run ends there
    in_flight: int = 256  # micro-batches a feeder has under way at once
    minimum_replicas: int = 1  # a stage is never taken below this by our own decision
    rebalance_seconds: float = 60.0  # 0: never
    migration_seconds: float = 10.0  # what a move costs the peer that moves, before one was measured
    staleness: int = 0  # 1: a step is computed with the weights before the last step's, whose sums are made meanwhile
    acknowledge_forward: bool = True  # tells feeders sooner who is slow, for one more message a stage

    def sections(self, stage: int) -> tuple[int, ...]:
        """Which sums a stage needs, as they are numbered in a REDUCE: its own, then those of each set of tied stages it is in."""
        return (stage, *(self.stages + number for number, together in enumerate(self.tied) if stage in together))

    def counts(self, stage: int, section: int) -> bool:
        """Whether a stage tells the norm of a sum it needs: its own, and of what it shares where it is the first to do so."""
        return section == stage or self.tied[section - self.stages][0] == stage
