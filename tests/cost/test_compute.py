"""The roofline against hand arithmetic, its monotony, and measured layers in its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import Device
from atoll.cluster.kinds import device_kind
from atoll.cost import Calibration, LayerTime
from atoll.cost.compute import ComputeTimes
from atoll.graph import Graph, Layer, Work, dense_transformer

IDEAL = Calibration(matmul_efficiency=1.0, matmul_half_depth=0.0, wave_outputs=0.0, memory_efficiency=1.0, kernel_seconds=0.0)


def device(kind: str = "A100-80GB", speed: float = 1.0) -> Device:
    return Device(name="d", kind=device_kind(kind), host="h", site="s", memory_bytes=1e9, speed=speed)


def one_layer(*work: Work, parameters: int = 0) -> Graph:
    return Graph(name="g", layers=(Layer(name="a", work=work, parameters=parameters),), precision="fp16")


def seconds(graph: Graph, calibration: Calibration = IDEAL, samples: float = 1.0, fraction: float = 1.0, tensor: int = 1) -> float:
    return ComputeTimes(graph, calibration, 28.0).table(device(), samples, fraction, tensor).forward[-1]


def test_a_matmul_takes_the_longer_of_arithmetic_and_traffic() -> None:
    kind = device_kind("A100-80GB")
    bound_by_arithmetic = Work(kind="matmul", flops=1e12, bytes=1e6, rows=1000, columns=1000, depth=1000)
    bound_by_traffic = Work(kind="matmul", flops=1e6, bytes=1e9, rows=1000, columns=1000, depth=1000)
    assert seconds(one_layer(bound_by_arithmetic)) == pytest.approx(1e12 / kind.flops["fp16"])
    assert seconds(one_layer(bound_by_traffic)) == pytest.approx(1e9 / kind.memory_bytes_per_s)


def test_backward_update_and_speed() -> None:
    work = Work(kind="matmul", flops=1e12, rows=8, columns=8, depth=8, backward=2.5)
    table = ComputeTimes(one_layer(work, parameters=1000), IDEAL, 28.0).table(device(), 2.0)
    slow = ComputeTimes(one_layer(work, parameters=1000), IDEAL, 28.0).table(device(speed=0.5), 2.0)
    assert table.backward[-1] == pytest.approx(2.5 * table.forward[-1])
    assert table.update[-1] == pytest.approx(28_000 / device_kind("A100-80GB").memory_bytes_per_s)
    assert (slow.forward[-1], slow.update[-1]) == pytest.approx((2 * table.forward[-1], 2 * table.update[-1]))


def test_a_matmul_at_half_depth_and_half_a_wave_runs_at_a_quarter() -> None:
    outputs = 1e-7 * device_kind("A100-80GB").flops["fp32"]
    work = Work(kind="matmul", flops=1e12, rows=outputs, columns=1, depth=100)
    small = Calibration(matmul_efficiency=1.0, matmul_half_depth=100.0, wave_outputs=1e-7, kernel_seconds=0.0)
    assert seconds(one_layer(work), small) == pytest.approx(4 * seconds(one_layer(work)))


@given(st.floats(1, 512), st.sampled_from(["", "rows", "columns", "depth"]), st.sampled_from([2, 4, 8]))
def test_more_samples_take_longer_but_less_each_and_a_split_never_takes_longer(samples: float, split: str, tensor: int) -> None:
    work = Work(kind="matmul", flops=2e9, bytes=1e5, weight_bytes=1e6, rows=1000, columns=1000, depth=1000, split=split)
    graph = one_layer(work)
    one, more = (seconds(graph, Calibration(), n) for n in (samples, 2 * samples))
    assert one < more <= 2 * one * (1 + 1e-9)
    assert seconds(graph, Calibration(), samples, 1 / tensor, tensor) <= one * (1 + 1e-9)


def test_expert_weights_are_read_only_by_the_lane_that_holds_them() -> None:
    work = Work(kind="matmul", weight_bytes=1e9, rows=1, columns=1, depth=1, expert=True)
    compute = ComputeTimes(one_layer(work), IDEAL, 28.0)
    assert compute.table(device(), 1.0, expert_lanes=4).forward[-1] == pytest.approx(compute.table(device(), 1.0).forward[-1] / 4)


def layer_time(samples: float, forward: float, tensor: int = 1, layer: str = "a") -> LayerTime:
    seconds = {"forward_seconds": forward, "backward_seconds": 2 * forward, "update_seconds": 0.5}
    return LayerTime(layer=layer, kind="A100-80GB", samples=samples, tensor=tensor, **seconds)


def test_measured_layers_go_before_the_roofline_and_are_interpolated() -> None:
    graph = one_layer(Work(kind="memory", bytes=1e9))
    compute = ComputeTimes(graph, Calibration(layer_times=(layer_time(2, 3.0), layer_time(4, 5.0))), 28.0)
    forwards = {n: compute.table(device(), n).forward[-1] for n in (1.0, 2.0, 3.0, 4.0, 8.0)}
    assert forwards == pytest.approx({1.0: 1.5, 2.0: 3.0, 3.0: 4.0, 4.0: 5.0, 8.0: 10.0})
    assert compute.table(device(), 3.0).backward[-1] == pytest.approx(8.0)
    assert compute.table(device(), 3.0).update[-1] == pytest.approx(0.5)
    assert compute.table(device("V100-32GB"), 3.0).forward[-1] < 1.0  # not measured there: the roofline
    assert compute.table(device(speed=0.5), 2.0).forward[-1] == pytest.approx(6.0)


def test_measured_splits_are_told_apart_and_known() -> None:
    graph = one_layer(Work(kind="memory", bytes=1e9))
    compute = ComputeTimes(graph, Calibration(layer_times=(layer_time(1, 3.0), layer_time(1, 2.0, tensor=2))), 28.0)
    assert compute.table(device(), 1.0).forward[-1] == 3.0
    assert compute.table(device(), 1.0, 0.5, 2).forward[-1] == 2.0
    assert compute.measured_split(device(), 2)
    assert not compute.measured_split(device(), 4)
    assert not compute.measured_split(device("V100-32GB"), 2)


def test_a_signature_stands_for_all_its_layers() -> None:
    graph = dense_transformer(name="g", layers=4, hidden=64, heads=4, sequence=32, vocabulary=100)
    table = ComputeTimes(graph, Calibration(layer_times=(layer_time(1, 1.0, layer="block"),)), 28.0).table(device(), 1.0)
    assert [round(b - a, 6) for a, b in zip(table.forward[1:5], table.forward[2:6], strict=True)] == [1.0] * 4


@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_lanes_that_divide_experts_run_fewer_of_them_on_the_tokens_of_all(lanes: int) -> None:
    """Eight experts of 10 rows each on one device; over lanes, 8 / lanes experts of 10 · lanes rows."""
    expert = Work(kind="matmul", flops=2e7, bytes=4e4, weight_bytes=2e6, rows=10, columns=1000, depth=1000, count=8, expert=True)
    merged = Work(
        kind="matmul",
        flops=2e7 * lanes,
        bytes=4e4 * lanes,
        weight_bytes=2e6,
        rows=10 * lanes,
        columns=1000,
        depth=1000,
        count=8 // lanes,
        expert=True,
    )
    divided = ComputeTimes(one_layer(expert), Calibration(), 28.0).table(device(), 3.0, expert_lanes=lanes)
    alone = ComputeTimes(one_layer(merged), Calibration(), 28.0).table(device(), 3.0)
    assert divided.forward == pytest.approx(alone.forward)
    assert divided.forward[-1] < ComputeTimes(one_layer(expert), Calibration(), 28.0).table(device(), 3.0).forward[-1]
