"""Times from measurements: exact where something was measured, growing with size, never zero or negative, and used for probed devices."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import (
    AttentionRate,
    ConvRate,
    DeviceKind,
    MatmulRate,
    Measurements,
    MemoryRate,
    OperatorRate,
    UpdateTime,
    make_cluster,
    make_site,
)
from atoll.cost import cost
from atoll.cost.measured import Curve, MeasuredTimes, Products
from atoll.graph import Graph, Layer, Work
from atoll.plan import Plan, Replica, Stage

SIDES = st.integers(1, 1 << 16)
SIZES = st.floats(1.0, 1e12)


def matmul(rows, columns, depth, rate, precision="fp32"):
    return MatmulRate(precision=precision, rows=rows, columns=columns, depth=depth, flops_per_s=rate)


MEASURED = Measurements(
    operator_seconds=5e-6,
    matmul=(
        matmul(64, 64, 64, 45e9),
        matmul(1, 1024, 1024, 19e9),
        matmul(32, 1024, 1024, 60e9),
        matmul(256, 256, 256, 78e9),
        matmul(1024, 64, 64, 69e9),
        matmul(512, 3072, 768, 86e9),
        matmul(1024, 1024, 1024, 90e9),
        matmul(256, 256, 256, 8e9, "bf16"),
    ),
    conv=(
        ConvRate(precision="fp32", batch=8, inputs=64, outputs=64, size=32, kernel=3, flops_per_s=85e9, backward_flops_per_s=70e9),
        ConvRate(precision="fp32", batch=8, inputs=64, outputs=64, size=32, kernel=3, groups=64, flops_per_s=9e9, backward_flops_per_s=4e9),
    ),
    memory=(MemoryRate(bytes=48e3, bytes_per_s=20e9), MemoryRate(bytes=3e6, bytes_per_s=50e9), MemoryRate(bytes=48e6, bytes_per_s=25e9)),
    operators=(
        OperatorRate(operator="gelu", bytes=5e5, bytes_per_s=7e9, backward_bytes_per_s=5e9),
        OperatorRate(operator="gelu", bytes=8e6, bytes_per_s=9e9, backward_bytes_per_s=9e9),
    ),
    attention=(
        AttentionRate(variant="", heads=8, sequence=128, depth=64, flops_per_s=58e9, backward_flops_per_s=60e9),
        AttentionRate(variant="dropout", heads=8, sequence=128, depth=64, flops_per_s=17e9, backward_flops_per_s=70e9),
    ),
    updates=(
        UpdateTime(optimizer="adamw", elements=1 << 10, seconds=40e-6),
        UpdateTime(optimizer="adamw", elements=1 << 20, seconds=2.6e-3),
        UpdateTime(optimizer="sgd", elements=1 << 20, seconds=0.2e-3),
    ),
    threads=1,
)
KIND = DeviceKind(name="box", memory_bytes=16e9, flops={"fp32": 90e9}, memory_bytes_per_s=20e9, cpu=True, measured=MEASURED)
TIMES = MeasuredTimes(KIND, MEASURED, "fp32")
PRODUCTS = Products([rate for rate in MEASURED.matmul if rate.precision == "fp32"])
UPDATE_BYTES = 28.0  # AdamW


def product(rows, columns, depth, **more):
    return Work(kind="matmul", flops=2.0 * rows * columns * depth, rows=rows, columns=columns, depth=depth, **more)


@pytest.mark.parametrize("rate", [rate for rate in MEASURED.matmul if rate.precision == "fp32"])
def test_a_product_that_was_measured_takes_what_it_took(rate):
    seconds = 2.0 * rate.rows * rate.columns * rate.depth / rate.flops_per_s
    assert PRODUCTS(rate.rows, rate.columns, rate.depth) == pytest.approx(seconds, rel=0.02)


@given(SIDES, SIDES, SIDES, st.integers(0, 2))
def test_products_take_time_and_larger_ones_longer(rows, columns, depth, which):
    shape = [rows, columns, depth]
    seconds = PRODUCTS(*shape)
    assert seconds > 0
    assert PRODUCTS(*(4 * side for side in shape)) > (0.9 if min(shape) < 16 else 1.0) * seconds  # the smallest cost a constant
    shape[which] *= 64
    assert PRODUCTS(*shape) > 0.5 * seconds  # one side alone may bring a better measured neighbour near


@given(st.integers(1 << 12, 1 << 16))
def test_large_products_keep_a_rate_that_was_measured(side):
    assert 40e9 < 2.0 * side**3 / PRODUCTS(side, side, side) < 140e9


@given(SIZES, st.floats(1.0, 100.0))
def test_curves_are_exact_and_never_fall(size, factor):
    points = [(48e3, 2.4e-6), (3e6, 60e-6), (48e6, 50e-6)]  # the last was disturbed less than the one before
    curve = Curve(points)
    assert [curve(at) for at, _ in points] == pytest.approx([2.4e-6, 60e-6, 60e-6])
    assert 0 < curve(size) <= curve(size * factor) * (1 + 1e-9)
    assert curve(4 * 48e6) == pytest.approx(4 * 60e-6)


def test_backward_is_priced_by_its_own_products():
    narrow = TIMES.work(product(4096, 1024, 16), 1.0, 1.0, 1)
    assert narrow.backward == pytest.approx(PRODUCTS(4096, 16, 1024) + PRODUCTS(1024, 16, 4096))
    assert TIMES.work(product(4096, 1024, 16, backward=0.0), 1.0, 1.0, 1).backward == 0.0
    biased = TIMES.work(product(4096, 1024, 16, operator="linear.bias"), 1.0, 1.0, 1)
    assert biased.forward == narrow.forward
    assert biased.backward > narrow.backward


def test_steps_of_a_recurrence_find_their_weights_at_hand():
    once = TIMES.work(product(16, 2048, 512), 1.0, 1.0, 1)
    steps = TIMES.work(product(16, 2048, 512, operator="lstm", count=50), 1.0, 1.0, 1)
    assert 0 < steps.forward < 50 * once.forward
    assert 0 < steps.backward < 50 * once.backward


def test_operators_take_what_was_measured_of_them():
    gelu = TIMES.work(Work(kind="memory", bytes=8e6, backward=1.5, operator="gelu"), 1.0, 1.0, 1)
    assert gelu == pytest.approx((8e6 / 9e9, 1.5 * 8e6 / 9e9))
    other = TIMES.work(Work(kind="memory", bytes=3e6, backward=1.0, operator="no such operator"), 1.0, 1.0, 1)
    assert other == pytest.approx((3e6 / 50e9, 3e6 / 50e9))
    tiny = TIMES.work(Work(kind="memory", bytes=4.0, backward=1.0), 1.0, 1.0, 1)
    assert tiny == (MEASURED.operator_seconds, MEASURED.operator_seconds)


def test_attention_and_convolutions_take_what_was_measured_of_them():
    attention = Work(kind="attention", flops=1e9, rows=1024, columns=128, depth=64, backward=2.5)
    for suffix, (forward, backward) in {"": (58e9, 60e9), ".dropout": (17e9, 70e9)}.items():
        named = msgspec.structs.replace(attention, operator=f"scaled_dot_product_attention{suffix}")
        assert TIMES.work(named, 1.0, 1.0, 1) == pytest.approx((1e9 / forward, 2.5e9 / backward))
    depthwise = Work(kind="conv", flops=1e9, rows=8 * 32**2, columns=64, depth=9, backward=2.0)
    assert TIMES.work(depthwise, 1.0, 1.0, 1) == pytest.approx((1e9 / 9e9, 2e9 / 4e9))


def test_an_update_takes_one_tensor_after_another():
    one = TIMES.update([1 << 20], UPDATE_BYTES)
    assert one == pytest.approx(2.6e-3)
    assert TIMES.update([1 << 20, 64], UPDATE_BYTES) == pytest.approx(one + 40e-6)
    assert TIMES.update([1 << 20], 12.0) == pytest.approx(0.2e-3)


@given(
    st.sampled_from(["matmul", "attention", "conv", "memory", "gather"]),
    SIDES,
    SIDES,
    SIDES,
    st.floats(0.25, 512),
    st.sampled_from(["", "gelu", "linear.bias", "scaled_dot_product_attention"]),
)
def test_any_work_takes_time(kind, rows, columns, depth, samples, operator):
    flops = 0.0 if kind in ("memory", "gather") else 2.0 * rows * columns * depth
    work = Work(kind=kind, flops=flops, bytes=4.0 * rows * (columns + depth), rows=rows, columns=columns, depth=depth, operator=operator)
    for measured in (MEASURED, Measurements(operator_seconds=1e-6)):
        passes = MeasuredTimes(KIND, measured, "fp32").work(work, samples, 1.0, 1)
        assert all(0 < seconds < math.inf for seconds in passes)


def test_a_probed_device_is_priced_by_its_measurements():
    layer = Layer(name="layer", work=(product(128, 1024, 1024),), parameters=1 << 20, tensors=(1 << 20,))
    cluster = make_cluster("one", [make_site("here", kind=KIND, link=("9 GB/s", "5 us"))])
    replica = Replica(devices=("here-0/0",), samples=(8,))
    plan = Plan(graph="g", cluster="one", batch_size=8, micro_batch_size=8, stages=(Stage(start=0, stop=1, replicas=(replica,)),))
    found = cost(Graph.from_layers("g", [layer]), cluster, plan)
    passes = TIMES.work(layer.work[0], 8.0, 1.0, 1)
    assert found.step_seconds == pytest.approx(passes.forward + passes.backward + 2.6e-3)
