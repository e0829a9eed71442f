"""Experts divided among processes compute what the whole model computes, whoever has which samples."""

import json
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.graph.capture import capture_program
from atoll.runtime.stage.expert import expert_counts
from tests.warm import run_warm_beside

from .expert_lanes import CASES, compare, job_of, lane_module

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """What each lane has found. Capturing is what takes long: every case once, on two cores."""
    folders = [tmp_path_factory.mktemp("lanes") for _ in range(2)]
    lanes = "import runpy; runpy.run_module('tests.runtime.stage.expert_lanes', run_name='__main__', alter_sys=True)"
    halves = zip(folders, (CASES[::2], CASES[1::2]), strict=True)
    run_warm_beside([[sys.executable, "-c", lanes, folder, *cases] for folder, cases in halves], cwd=Path(__file__).parents[3])
    found: list[dict[str, dict[str, float]]] = [{}, {}, {}]
    for folder in folders:
        for rank, of_rank in enumerate(found):
            of_rank |= json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_lanes_compute_what_the_whole_model_computes(differences: list[dict[str, dict[str, float]]], case: str, lanes: int) -> None:
    for found in differences[:lanes]:
        assert found[f"{case} {lanes}"]["loss"] < TOLERANCE
        assert found[f"{case} {lanes}"]["gradient"] < TOLERANCE


@pytest.mark.parametrize("how", ["again", "without samples"])
@pytest.mark.parametrize("case", ["Picked", "Repeated"])
def test_recomputing_and_a_lane_without_samples(differences: list[dict[str, dict[str, float]]], case: str, how: str) -> None:
    for found in differences:
        assert found[f"{case} {how}"]["loss"] < TOLERANCE
        assert found[f"{case} {how}"]["gradient"] < TOLERANCE


@pytest.mark.parametrize("case", ["Picked", "Capacity"])
def test_one_lane_exchanges_nothing_and_computes_the_same(case: str) -> None:
    job = job_of(case)
    found = compare(job, capture_program(job), (3,), 0, None)
    assert max(found.values()) < TOLERANCE


def test_routed_rows_are_computed_without_copies_of_weights() -> None:
    captured = capture_program(job_of("Collapsed"))
    module, _ = lane_module(captured, job_of("Collapsed").model(), 0, 1, None)
    products = [node for node in module.graph.nodes if getattr(node.target, "__name__", "") == "rows_times_weight"]
    assert [node.args[0].op for node in products] == ["get_attr"]


@given(st.integers(1, 64), st.integers(0, 200))
def test_experts_are_dealt_out_evenly(lanes: int, more: int) -> None:
    counts = expert_counts(lanes + more, lanes)
    assert len(counts) == lanes
    assert list(accumulate(counts))[-1] == lanes + more
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1
