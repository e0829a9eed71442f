"""Plan: what runs where."""

from atoll.plan.plan import CodecName, Mode, Plan, Replica, Schedule, Stage

__all__ = ["CodecName", "Mode", "Plan", "Replica", "Schedule", "Stage"]
