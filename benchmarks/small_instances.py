"""Random small planning problems: mixed devices, one to three sites, a handful of layers; some tight in memory."""

import random

from atoll.cluster import Cluster, DeviceKind, make_cluster, make_site
from atoll.graph import Graph, Layer, Work

__all__ = ["Instance", "random_instance"]

Instance = tuple[Graph, Cluster, int]


def random_instance(seed: int, most_devices: int = 5, most_layers: int = 6) -> Instance:
    """Graph, cluster and batch size of problem number `seed`."""
    rng = random.Random(seed)
    graph = _graph(rng, rng.randint(2, most_layers))
    cluster = _cluster(rng, graph, _number_of_devices(rng, most_devices))
    return graph, cluster, rng.choice((4, 6, 8))


def _number_of_devices(rng: random.Random, most: int) -> int:
    return rng.choices(range(2, most + 1), weights=(3, 5, 4, 2)[: most - 1])[0]


def _graph(rng: random.Random, layers: int) -> Graph:
    made = []
    for i in range(layers):
        hidden = rng.choice((512, 1024, 2048))
        rows = rng.choice((64, 256, 512))
        flops = 2.0 * rows * hidden * hidden * rng.uniform(2, 12)
        width = 4.0 * rows * hidden
        split = rng.random() < 0.6
        work = Work(kind="matmul", flops=flops, bytes=2 * width, rows=rows, columns=hidden, depth=hidden, split="columns" if split else "")
        parameters = int(hidden * hidden * rng.uniform(2, 12))
        made.append(
            Layer(
                name=f"layer{i}",
                work=(work,),
                parameters=parameters,
                split_parameters=parameters if split else 0,
                saved_bytes=width * rng.uniform(4, 12),
                input_bytes=width,
                output_bytes=width,
                gradient_bytes=width,
                cut=rng.random() < 0.9,
                tensor_units=8 if split else 1,
                tensor_bytes=width if split else 0.0,
                tensor_reductions=1 if split else 0,
            )
        )
    return Graph.from_layers(f"random{layers}", made)


def _cluster(rng: random.Random, graph: Graph, devices: int) -> Cluster:
    state = 16.0 * graph.parameters
    kinds = []
    for i in range(rng.randint(1, 3)):
        memory = 1.2e9 + state * rng.choice((0.35, 0.6, 1.5, 3.0)) + rng.choice((0.1e9, 2e9))
        flops = {"fp32": rng.uniform(4e12, 40e12)}
        kinds.append(
            DeviceKind(name=f"kind{i}", memory_bytes=memory, flops=flops, memory_bytes_per_s=rng.uniform(2e11, 2e12), link_bytes_per_s=2e10)
        )
    sites = min(devices, rng.randint(1, 3))
    numbers = [1] * sites
    for _ in range(devices - sites):
        numbers[rng.randrange(sites)] += 1
    made = []
    for i, number in enumerate(numbers):
        chosen: dict[str, int] = {}
        for _ in range(number):
            name = rng.choice(kinds).name
            chosen[name] = chosen.get(name, 0) + 1
        hosts = number if len(chosen) == 1 and rng.random() < 0.4 else 1
        groups = [(next(kind for kind in kinds if kind.name == name), 1 if hosts > 1 else count) for name, count in chosen.items()]
        made.append(make_site(f"site{i}", kind=groups, hosts=hosts, network=rng.choice(("1 Gbit/s", "10 Gbit/s", "100 Gbit/s"))))
    names = [site.name for site in made]
    links = {
        (a, b): (rng.choice(("200 Mbit/s", "2 Gbit/s", "20 Gbit/s")), rng.choice(("1 ms", "20 ms")))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    return make_cluster("random", made, links)
