"""Plan: what runs where — its text and JSON forms, its rules, and what differs between two of them."""

from atoll.plan.diff import diff
from atoll.plan.division import part_of, unit_runs
from atoll.plan.plan import CodecName, Mode, Plan, Replica, Schedule, Stage
from atoll.plan.text import load_plan, parse_plan, save_plan, to_text
from atoll.plan.validate import validate

__all__ = [
    "CodecName",
    "Mode",
    "Plan",
    "Replica",
    "Schedule",
    "Stage",
    "diff",
    "load_plan",
    "parse_plan",
    "part_of",
    "save_plan",
    "to_text",
    "unit_runs",
    "validate",
]
