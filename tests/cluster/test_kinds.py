"""The catalogue: its figures are physically possible and stand in the relations the hardware does."""

import re
from itertools import pairwise

import pytest

from atoll.cluster import catalogue, device_kind
from atoll.cluster.kinds import PRECISIONS, read_kind
from atoll.errors import ClusterError

KINDS = list(catalogue().values())
IS_CPU = re.compile(r"Xeon|EPYC|Graviton|Grace$|Ryzen")
TERA = 1e12


def test_there_are_at_least_fifty_accelerators_and_ten_cpus():
    cpus = [kind for kind in KINDS if IS_CPU.match(kind.name)]
    assert len(cpus) >= 10
    assert len(KINDS) - len(cpus) >= 50


def test_cpus_say_that_they_are():
    assert {kind.name for kind in KINDS if kind.cpu} == {kind.name for kind in KINDS if IS_CPU.match(kind.name)}


def test_it_cannot_be_changed():
    with pytest.raises(TypeError):
        catalogue()["X"] = KINDS[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_figures_are_possible(kind):
    assert set(kind.flops) <= set(PRECISIONS)
    assert 1 <= kind.flops["fp32"] / TERA <= 400
    assert kind.flops.get("bf16", 0) / TERA <= 3000, "more than 3 PFLOPS of bf16 is a figure with sparsity"
    assert 7e9 <= kind.memory_bytes <= 500e9
    assert 50e9 <= kind.memory_bytes_per_s <= 10e12
    assert kind.link_bytes_per_s == 0 or 10e9 <= kind.link_bytes_per_s < kind.memory_bytes_per_s
    assert kind.source


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_narrower_numbers_are_not_slower(kind):
    ladder = [kind.flops[p] for p in ("fp32", "tf32", "fp16", "fp8", "fp4") if p in kind.flops]
    assert all(a <= b for a, b in pairwise(ladder))
    assert kind.flops.get("fp64", 0) <= kind.flops["fp32"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_balance_of_compute_and_memory_is_that_of_real_devices(kind):
    flops_per_byte = max(kind.flops.get("bf16", 0), kind.flops.get("fp16", 0), kind.flops["fp32"]) / kind.memory_bytes_per_s
    assert 4 <= flops_per_byte <= 700


@pytest.mark.parametrize(
    ("slower", "faster", "precision"),
    [
        ("K80", "P100-16GB", "fp32"),
        ("P100-16GB", "P100-SXM2-16GB", "fp32"),
        ("P100-SXM2-16GB", "V100-PCIe-16GB", "fp32"),
        ("V100-PCIe-32GB", "V100-32GB", "fp16"),
        ("T4", "V100-16GB", "fp16"),
        ("V100-32GB", "A100-40GB", "fp16"),
        ("A30", "A100-40GB", "bf16"),
        ("A100-80GB", "H100-PCIe-80GB", "bf16"),
        ("H100-PCIe-80GB", "H100-80GB", "bf16"),
        ("H20-96GB", "H100-80GB", "bf16"),
        ("H100-80GB", "B200", "bf16"),
        ("B200", "GB200", "bf16"),
        ("RTX-2080-Ti", "RTX-3090", "fp16"),
        ("RTX-3090", "RTX-4090", "bf16"),
        ("RTX-4090", "RTX-5090", "bf16"),
        ("MI100", "MI300X", "bf16"),
        ("MI300X", "MI355X", "bf16"),
        ("TPU-v2", "TPU-v3", "bf16"),
        ("TPU-v5e", "TPU-v6e", "bf16"),
        ("Trainium", "Trainium2", "bf16"),
        ("Gaudi2", "Gaudi3", "bf16"),
        ("EPYC-7742", "EPYC-7763", "fp32"),
        ("Xeon-8380", "Xeon-8480+", "fp32"),
    ],
)
def test_generations_are_in_order(slower, faster, precision):
    assert device_kind(slower).flops[precision] < device_kind(faster).flops[precision]


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("V100-32GB", "fp32", 15.7),
        ("V100-32GB", "fp16", 125),
        ("P100-16GB", "fp32", 9.3),
        ("P100-SXM2-16GB", "fp32", 10.6),
        ("T4", "fp16", 65),
        ("A100-80GB", "bf16", 312),
        ("A100-80GB", "tf32", 156),
        ("H100-80GB", "bf16", 989.4),
        ("H100-80GB", "fp8", 1978.9),
        ("RTX-3090", "bf16", 71),
        ("RTX-2080-Ti", "fp16", 53.8),
        ("Titan-RTX", "fp16", 130.5),
        ("GH200-96GB", "bf16", 989.4),
    ],
)
def test_well_known_dense_figures(name, precision, tflops):
    assert device_kind(name).flops[precision] == pytest.approx(tflops * TERA)


def test_a_device_without_bf16_falls_back_to_fp32():
    assert device_kind("V100-32GB").peak("bf16") == device_kind("V100-32GB").peak("fp32")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ClusterError, match=r"unknown accelerator 'V100-32G'; did you mean 'V100-32GB'\?"):
        device_kind("V100-32G")
    with pytest.raises(ClusterError, match=r"did you mean 'A100-80GB'\?"):
        device_kind("a100 80gb")
    with pytest.raises(ClusterError, match="did you mean 'V100-16GB' or 'V100-32GB' or"):
        device_kind("V100")
    with pytest.raises(ClusterError, match=r"describe it in a \[\[device_kind\]\] table"):
        device_kind("quantum")


def test_a_kind_needs_its_fp32_rate():
    with pytest.raises(ClusterError, match="X › flops › fp32: missing"):
        read_kind({"name": "X", "memory": "1 GB", "memory_bandwidth": "1 GB/s", "flops": {"bf16": "1 TFLOPS"}}, "c.toml: X")
