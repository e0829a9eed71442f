"""Random plans on small mixed clusters, with a graph that does real work; and changes to clusters that properties ask about."""

from collections.abc import Callable
from functools import lru_cache

import msgspec
from hypothesis import assume
from hypothesis import strategies as st

from atoll.cluster import Cluster, Device, Link
from atoll.graph import Graph, dense_transformer, mixture_of_experts
from atoll.plan import Plan, Replica, Stage
from tests.plan.strategies import valid_cases


@lru_cache(maxsize=16)
def small_graph(layers: int) -> Graph:
    """`layers` layers: an embedding, blocks with experts, a head with the embedding's table."""
    return mixture_of_experts(
        name="g",
        layers=layers - 2,
        hidden=512,
        heads=8,
        sequence=128,
        vocabulary=1024,
        experts=8,
        active_experts=2,
        expert_hidden=1024,
        every=2,
    )


def dense_graph(layers: int, tied: bool = True) -> Graph:
    return dense_transformer(name="g", layers=layers - 2, hidden=512, heads=8, sequence=128, vocabulary=1024, tied=tied)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Graph, Cluster]:
    """A valid plan; devices differ in speed."""
    plan, graph, cluster = draw(valid_cases())
    assume(len(graph.layers) > 2)
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(cluster.devices), max_size=len(cluster.devices)))
    by_name = dict(zip([device.name for device in cluster.devices], speeds, strict=True))
    return plan, small_graph(len(graph.layers)), with_devices(cluster, lambda d: msgspec.structs.replace(d, speed=by_name[d.name]))


def divided_alike(plan: Plan) -> bool:
    """Whether micro-batches run in columns; elsewhere a shorter task may make a longer step, as in any greedy schedule (Graham 1966)."""
    return plan.schedule != "interleaved" and len({tuple(r.total_samples for r in stage.replicas) for stage in plan.stages}) == 1


def with_devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    sites = []
    for site in cluster.sites:
        hosts = [msgspec.structs.replace(host, devices=tuple(map(change, host.devices))) for host in site.hosts]
        sites.append(msgspec.structs.replace(site, hosts=tuple(hosts)))
    return msgspec.structs.replace(cluster, sites=tuple(sites))


def with_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    sites = []
    for site in cluster.sites:
        hosts = [msgspec.structs.replace(host, link=change(host.link)) for host in site.hosts]
        sites.append(msgspec.structs.replace(site, hosts=tuple(hosts), link=change(site.link)))
    return msgspec.structs.replace(cluster, sites=tuple(sites), links=tuple(map(change, cluster.links)))


def renamed(plan: Plan, cluster: Cluster, name: Callable[[str], str]) -> tuple[Plan, Cluster]:
    """The same with other names for sites, hosts and devices; a device keeps its number on its host."""

    def device_name(old: str) -> str:
        host, number = old.rsplit("/", 1)
        return f"{name(host)}/{number}"

    def link(old: Link) -> Link:
        return msgspec.structs.replace(old, between=(name(old.between[0]), name(old.between[1])))

    def device(old: Device) -> Device:
        return msgspec.structs.replace(old, name=device_name(old.name), host=name(old.host), site=name(old.site))

    moved = with_links(with_devices(cluster, device), link)
    sites = []
    for site in moved.sites:
        hosts = [msgspec.structs.replace(host, name=name(host.name), site=name(host.site)) for host in site.hosts]
        sites.append(msgspec.structs.replace(site, name=name(site.name), hosts=tuple(hosts)))
    stages = [
        msgspec.structs.replace(
            stage,
            replicas=tuple(
                msgspec.structs.replace(replica, devices=tuple(map(device_name, replica.devices))) for replica in stage.replicas
            ),
        )
        for stage in plan.stages
    ]
    codecs = {}
    for old, new in zip(cluster.links, moved.links, strict=True):
        if old.name in plan.codecs:
            codecs[new.name] = plan.codecs[old.name]
    changed = msgspec.structs.replace(plan, stages=tuple(stages), codecs=codecs)
    return changed, msgspec.structs.replace(moved, sites=tuple(sites))


def data_parallel(samples: list[int], devices: list[str], micro_batch: int, layers: int, **stage: object) -> Plan:
    """One stage, one replica a device."""
    replicas = tuple(Replica(devices=(name,), samples=(share,)) for name, share in zip(devices, samples, strict=True))
    return Plan(
        graph="g",
        cluster="c",
        batch_size=sum(samples),
        micro_batch_size=micro_batch,
        stages=(Stage(start=0, stop=layers, replicas=replicas, **stage),),  # type: ignore[arg-type]
    )


def pipeline(cuts: list[int], devices: list[list[str]], batch: int, micro_batch: int, schedule: str = "1f1b", tensor: int = 1) -> Plan:
    """Stages between cuts, each on its devices; every `tensor` devices are a replica with an equal share."""
    stages = []
    for start, stop, names in zip(cuts, cuts[1:], devices, strict=False):
        groups = [tuple(names[i : i + tensor]) for i in range(0, len(names), tensor)]
        replicas = tuple(Replica(devices=group, samples=(batch // len(groups),)) for group in groups)
        stages.append(Stage(start=start, stop=stop, replicas=replicas, tensor=tensor))
    fields = {"graph": "g", "cluster": "c", "batch_size": batch, "micro_batch_size": micro_batch}
    return Plan(**fields, stages=tuple(stages), schedule=schedule)  # type: ignore[arg-type]
