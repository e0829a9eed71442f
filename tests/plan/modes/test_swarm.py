"""What a swarm does otherwise than a plan says is told."""

import pytest

from atoll.plan import parse_plan
from atoll.plan.modes.swarm import SWARM

HEAD = "plan v1 graph=g cluster=c mode=swarm schedule={schedule} batch=16 micro_batch={micro}\n"
ONE, TWO = "stage 0: layers 0-3: {shares}\n", "stage 0: layers 0-1: {shares}\nstage 1: layers 2-3: d/0=16\n"


@pytest.mark.parametrize(
    ("schedule", "micro", "stages", "shares", "notes"),
    [
        ("1f1b", 4, ONE, "a/0=8 b/0=4 c/0=4", []),
        ("1f1b", 6, ONE, "a/0=6 b/0=6 c/0=4", []),  # 6, 6 and the last one of 4
        ("1f1b", 4, ONE, "a/0=7 b/0=5 c/0=4", ["a swarm hands out whole micro-batches of 4 samples; the prediction is of shares as"]),
        (
            "1f1b",
            16,
            ONE,
            "a/0=6 b/0=6 c/0=4",
            ["1 micro-batch of at most 16 samples for 3 workers of a stage: a swarm hands out whole ones"],
        ),
        ("1f1b", 2, TWO, "a/0=8 b/0=8", []),
        ("gpipe", 2, TWO, "a/0=8 b/0=8", ["schedule=gpipe: a swarm's workers run backwards first"]),
    ],
)
def test_what_is_priced_otherwise_than_it_runs_is_said(schedule: str, micro: int, stages: str, shares: str, notes: list[str]) -> None:
    found = SWARM.notes(parse_plan(HEAD.format(schedule=schedule, micro=micro) + stages.format(shares=shares)))
    assert len(found) == len(notes)
    assert all(note in sentence for note, sentence in zip(notes, found, strict=True))
