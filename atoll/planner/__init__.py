"""Planner: from a graph and a cluster to the best plans, with reasons."""

from atoll.planner.planner import Candidate, Planned, plan

__all__ = ["Candidate", "Planned", "plan"]
