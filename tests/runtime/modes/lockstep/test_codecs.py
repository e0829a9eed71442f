"""Codecs of a plan in lockstep: fewer bytes between sites, losses as near to one process's as the codec is, ranks of a lane still equal."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.codec import codec_spec
from atoll.errors import PlanError
from atoll.plan import parse_plan
from atoll.runtime.modes.lockstep.channels import backward_hops, forward_hops
from atoll.runtime.modes.lockstep.layout import Layout
from tests.warm import run_warm

from .codec_ranks import CLUSTER, CODECS

pytestmark = pytest.mark.timeout(600)

TOLERANCE = {"none": 1e-5, "bf16": 5e-3, "int8": 2e-2, "int4": 2e-1}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("codecs")
    done = run_warm([sys.executable, Path(__file__).with_name("codec_ranks.py"), folder])
    assert done.returncode == 0, done.stderr[-5000:]
    alone = json.loads((folder / "alone.json").read_text(encoding="utf-8"))
    return alone, [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]


@pytest.mark.parametrize("codec", CODECS)
def test_losses_are_as_near_as_the_codec_is(found: tuple[list[float], list[dict[str, Any]]], codec: str) -> None:
    alone, ranks = found
    for rank in ranks:
        assert rank[codec]["losses"] == pytest.approx(alone, rel=TOLERANCE[codec])
        if codec != "none":
            assert rank[codec]["losses"] != rank["none"]["losses"]


@pytest.mark.parametrize("codec", CODECS[1:])
def test_fewer_bytes_are_sent(found: tuple[list[float], list[dict[str, Any]]], codec: str) -> None:
    _, ranks = found
    for rank in ranks:
        sent, plain = rank[codec]["sent"], rank["none"]["sent"]
        if plain:  # the second of a lane's ranks sends nothing back
            assert sent == pytest.approx(plain * codec_spec(codec).ratio(4.0), rel=0.05)


@pytest.mark.parametrize("codec", CODECS)
def test_ranks_of_a_lane_stay_equal(found: tuple[list[float], list[dict[str, Any]]], codec: str) -> None:
    """They compute with the same values: what they both hold whole is the same to the bit."""
    _, (_, second, third) = found
    assert second[codec]["whole"] == third[codec]["whole"]
    assert second[codec]["whole"]


def test_all_ranks_of_a_lane_use_the_codec_of_its_first() -> None:
    """Were it decided rank by rank, those of one lane would compute with different values."""
    text = "plan v1 graph=g cluster=c batch=4 micro_batch=2\ncodec int8: a–b\n"
    plan = parse_plan(f"{text}stage 0: layers 0-0: a-0/0=4\nstage 1: layers 1-1 tensor=2: (b-0/0 a-0/1)=4\n")
    layout = Layout(plan, cluster=CLUSTER)
    assert [hop.codec for hop in forward_hops(layout, 1, 0)] == ["int8", "int8"]
    assert [hop.codec for hop in backward_hops(layout, 0, 0)] == ["int8"]


def test_without_the_cluster_nobody_knows_which_devices_a_link_joins() -> None:
    stages = "stage 0: layers 0-0: a-0/0=4\nstage 1: layers 1-1: b-0/0=4\n"
    plan = parse_plan(f"plan v1 graph=g cluster=c batch=4 micro_batch=2\ncodec int8: a–b\n{stages}")
    with pytest.raises(PlanError, match=r"int8 on a–b.*cluster 'c'.*--cluster"):
        forward_hops(Layout(plan), 1, 0)
