"""Random plans: any at all for the round trips, and valid ones with their graph and cluster for everybody else."""

from itertools import pairwise
from typing import Any, get_args

from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from atoll.graph import Graph, Layer
from atoll.plan import CodecName, Mode, Plan, Replica, Schedule, Stage
from atoll.plan.modes import installed_modes, mode_names

_HOSTS = st.sampled_from(["oslo-0", "oslo-1", "node007", "node008", "node10", "10.0.0.1", "a b", "x[1]", 'quo"te', "", "#", "münchen"])
names = st.one_of(
    st.text(max_size=8),
    st.text(alphabet="a-/01289", max_size=6),
    st.builds(lambda host, index: f"{host}/{index}", _HOSTS, st.integers(0, 12)),
)
numbers = st.integers(-3, 300)


SHARES = {1: [(), (1,)], 2: [(), (1, 1), (3, 1), (3, 5)], 4: [(), (1, 2, 4, 1), (1, 1, 1, 1)]}  # that divide 8 units


@st.composite
def runs_of_names(draw: st.DrawFn) -> list[str]:
    """Names as clusters have them: consecutive numbers, sometimes padded."""
    stem, width = draw(st.sampled_from(["h-", "rack3/n", "é "])), draw(st.integers(0, 3))
    hosts, devices = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    first = draw(st.integers(0, 98))
    return [f"{stem}{str(first + host).zfill(width)}/{device}" for host in range(hosts) for device in range(devices)]


device_lists = st.one_of(st.lists(names, max_size=6), runs_of_names())
replicas = st.builds(
    Replica,
    devices=device_lists.map(tuple),
    samples=st.lists(st.sampled_from([1, 8, 64, -2]), max_size=4).map(tuple),
    tensor_shares=st.one_of(st.just(()), st.lists(st.integers(-1, 5), max_size=3).map(tuple)),
)
stages = st.builds(
    Stage,
    start=numbers,
    stop=numbers,
    replicas=st.lists(replicas, max_size=5).map(tuple),
    tensor=st.integers(-1, 4),
    sharded=st.booleans(),
    expert=st.booleans(),
    recompute=st.booleans(),
    split=st.one_of(st.just(()), st.lists(st.integers(-2, 9), max_size=5).map(tuple)),
)
any_plans = st.builds(
    Plan,
    graph=names,
    cluster=names,
    batch_size=numbers,
    micro_batch_size=numbers,
    stages=st.lists(stages, max_size=4).map(tuple),
    mode=st.sampled_from(mode_names()),
    schedule=st.sampled_from(get_args(Schedule)),
    codecs=st.dictionaries(names, st.sampled_from(get_args(CodecName)), max_size=4),
    staleness=numbers,
)


def make_cluster(hosts: int, devices: int, sites: int = 1) -> Cluster:
    """A plain cluster: sites s0…, each with as many hosts of as many alike devices."""
    kind = DeviceKind(name="chip", memory_bytes=32e9, flops={"fp32": 1e13}, memory_bytes_per_s=1e12)
    return Cluster(
        name="c",
        sites=tuple(
            Site(
                name=f"s{s}",
                link=Link(between=(f"s{s}", f"s{s}"), bytes_per_s=1e9, latency_s=1e-4),
                hosts=tuple(
                    Host(
                        name=f"s{s}-{h}",
                        site=f"s{s}",
                        link=Link(between=(f"s{s}-{h}", f"s{s}-{h}"), bytes_per_s=1e10, latency_s=1e-5),
                        devices=tuple(
                            Device(name=f"s{s}-{h}/{d}", kind=kind, host=f"s{s}-{h}", site=f"s{s}", memory_bytes=32e9)
                            for d in range(devices)
                        ),
                    )
                    for h in range(hosts)
                ),
            )
            for s in range(sites)
        ),
        links=tuple(Link(between=(f"s{a}", f"s{b}"), bytes_per_s=1e8, latency_s=0.02) for a in range(sites) for b in range(a + 1, sites)),
    )


def make_graph(layers: int, **fields: Any) -> Graph:
    """A row of layers that split into eight parts and have eight experts each, unless told otherwise."""
    return Graph.from_layers("g", [Layer(name=f"h.{i}", **{"tensor_units": 8, "experts": 8, **fields}) for i in range(layers)])


@st.composite
def _stage_of(draw: st.DrawFn, start: int, stop: int, pool: list[str], micro_batches: int, micro_batch: int) -> Stage:
    """A stage on the first devices of the pool, which shrinks; it takes `micro_batches` whole micro-batches."""
    tensor = draw(st.sampled_from([t for t in (1, 2, 4) if t <= len(pool)]))
    lanes = draw(st.integers(1, min(3, len(pool) // tensor, micro_batch)))
    count = draw(st.integers(1, min(4, len(pool) // (tensor * lanes), micro_batches)))
    edges = [0, *sorted(draw(st.sets(st.integers(1, micro_batches - 1), min_size=count - 1, max_size=count - 1))), micro_batches]
    made = []
    for share in (b - a for a, b in pairwise(edges)):
        devices = tuple(pool.pop(0) for _ in range(lanes * tensor))
        samples = [share] * lanes
        samples[0] += share * (micro_batch - lanes)
        shares = draw(st.sampled_from(SHARES[tensor]))
        made.append(Replica(devices=devices, samples=tuple(samples), tensor_shares=shares))
    division = draw(st.sampled_from([(False, False), (True, False), (False, True)])) if lanes > 1 else (False, False)
    splittable = lanes > 1 and tensor == 1 and not division[1]
    split = tuple(sorted(draw(st.sets(st.integers(start, stop - 1))))) if splittable else ()
    flags = {"sharded": division[0], "expert": division[1], "recompute": draw(st.booleans())}
    return Stage(start=start, stop=stop, replicas=tuple(made), tensor=tensor, split=split, **flags)


@st.composite
def valid_cases(draw: st.DrawFn) -> tuple[Plan, Graph, Cluster]:
    """A valid plan with the graph and the cluster it was made for."""
    stage_count = draw(st.integers(1, 4))
    layers = draw(st.integers(max(2, stage_count), 8))
    cluster = make_cluster(hosts=draw(st.integers(2, 3)), devices=draw(st.sampled_from([2, 4])), sites=draw(st.integers(1, 2)))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, layers - 1), min_size=stage_count - 1, max_size=stage_count - 1))), layers]
    micro_batches, micro_batch = draw(st.integers(2, 8)), draw(st.integers(1, 4))
    names = [device.name for device in cluster.devices]
    size = len(names) // stage_count
    pools = [names[i * size : (i + 1) * size] for i in range(stage_count)]
    made = [draw(_stage_of(cuts[i], cuts[i + 1], pools[i], micro_batches, micro_batch)) for i in range(stage_count)]
    plan = Plan(
        graph="g",
        cluster="c",
        batch_size=micro_batches * micro_batch,
        micro_batch_size=micro_batch,
        stages=tuple(made),
        schedule=draw(st.sampled_from(get_args(Schedule))),
        codecs={link.name: draw(st.sampled_from(get_args(CodecName))) for link in cluster.links if draw(st.booleans())},
    )
    modes: list[Mode] = [rules.name for rules in installed_modes() if not rules.for_collaborations and rules.why_not(plan) is None]
    return replace(plan, mode=draw(st.sampled_from(modes))), make_graph(layers), cluster
