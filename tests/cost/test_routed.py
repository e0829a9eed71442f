"""Micro-batches on any routes: the engine against a simulation that is as plain as can be, and against what must hold of any step."""

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cost.pipeline import Hop, Hops, StageReplica, simulate
from atoll.plan.division import route

seconds = st.floats(0.01, 10.0)


class Network(NamedTuple):
    """Any numbers of replicas, any shares, any hops, any limits."""

    workers: list[list[StageReplica]]
    routes: list[tuple[int, ...]]
    onward: list[Hops]
    back: list[Hops]
    limits: list[int]


@st.composite
def networks(draw: st.DrawFn) -> Network:
    total = draw(st.integers(1, 24))
    workers: list[list[StageReplica]] = []
    routes = []
    devices = 0
    for _ in range(draw(st.integers(1, 4))):
        parts = draw(st.integers(1, min(4, total)))
        cuts = st.sets(st.integers(1, max(1, total - 1)), min_size=parts - 1, max_size=parts - 1)
        edges = [0, *sorted(draw(cuts)), total]
        routes.append(route(tuple(b - a for a, b in pairwise(edges))))
        workers.append([StageReplica(draw(seconds), draw(seconds), devices + i) for i in range(parts)])
        devices += parts
    both: tuple[list[Hops], list[Hops]] = ([], [])
    links = 0
    for s, (here, there) in enumerate(pairwise(workers)):
        for direction, rows in enumerate(both):
            shared = draw(st.booleans())  # a sender's transfers to all receivers queue together, or to each by itself
            sender_links: dict[tuple[int, int], int] = {}
            row: Hops = {}
            for i in range(len(here)):
                for j in range(len(there)):
                    who = (j if direction else i, -1 if shared else (i if direction else j))
                    number = sender_links.setdefault(who, links + len(sender_links))
                    row[i, j] = Hop(draw(st.floats(0.0, 12.0)), draw(st.floats(0.0, 3.0)), draw(st.sampled_from([-1, number])))
            links += len(sender_links)
            rows.append({pair: row[pair] for pair in set(zip(routes[s], routes[s + 1], strict=True))})
    limits = draw(st.lists(st.integers(1, 6), min_size=devices, max_size=devices))
    return Network(workers, routes, *both, limits)


class Plain:
    """The policy, looked up in the state of everyone at every moment at which something may happen."""

    def __init__(self, network: Network, schedule: str) -> None:
        self.network = network
        self.stages = len(network.workers)
        total = len(network.routes[0])
        self.places = [(s, i) for s, row in enumerate(network.workers) for i in range(len(row))]
        self.left = {(s, i): network.routes[s].count(i) for s, i in self.places}
        self.held = dict.fromkeys(self.places, 0)
        self.most_held = dict.fromkeys(self.places, 0)
        self.free = dict.fromkeys(self.places, 0.0)
        self.limit = {(s, i): total + 1 if schedule == "gpipe" else network.limits[network.workers[s][i].device] for s, i in self.places}
        self.links: dict[int, float] = {}
        self.arrivals: dict[tuple[str, int, int], dict[int, float]] = {(kind, *place): {} for kind in "FB" for place in self.places}
        for m, i in enumerate(network.routes[0]):
            self.arrivals["F", 0, i][m] = 0.0

    def wants(self, place: tuple[int, int]) -> str:
        return "F" if self.left[place] and self.held[place] < self.limit[place] else "B"

    def next_beginning(self) -> tuple[float, int, int, str] | None:
        begins = []
        for place in self.places:
            kind = self.wants(place)
            if inputs := self.arrivals[kind, *place]:
                begins.append((max(self.free[place], min(inputs.values())), *place, kind))
        return min(begins, default=None)

    def begin(self, now: float, s: int, i: int, kind: str) -> None:
        inputs = self.arrivals[kind, s, i]
        m = min(m for m, arrival in inputs.items() if arrival <= now)
        del inputs[m]
        worker = self.network.workers[s][i]
        end = self.free[s, i] = now + (worker.forward if kind == "F" else worker.backward)
        self.held[s, i] += 1 if kind == "F" else -1
        self.left[s, i] -= kind == "F"
        self.most_held[s, i] = max(self.most_held[s, i], self.held[s, i])
        if kind == "F" and s == self.stages - 1:
            self.arrivals["B", s, i][m] = end
        elif kind == "F":
            j = self.network.routes[s + 1][m]
            self.arrivals["F", s + 1, j][m] = self.arrive(end, self.network.onward[s][i, j])
        elif s:
            j = self.network.routes[s - 1][m]
            self.arrivals["B", s - 1, j][m] = self.arrive(end, self.network.back[s - 1][j, i])

    def arrive(self, end: float, hop: Hop) -> float:
        sent = max(end, self.links.get(hop.link, 0.0)) if hop.link >= 0 else end
        self.links[hop.link] = sent + hop.occupancy
        return sent + hop.occupancy + hop.latency

    def break_circle(self) -> bool:
        when = max([*self.free.values(), *[arrival for inputs in self.arrivals.values() for arrival in inputs.values()]])
        for wanted, other in ("FB", "BF"):
            waiting = [place for place in self.places if self.wants(place) == wanted and self.arrivals[other, *place]]
            for place in waiting:
                self.begin(when, *place, other)
            if waiting:
                return True
        return False

    def play(self) -> None:
        while True:
            while (following := self.next_beginning()) is not None:
                self.begin(*following)
            if not self.break_circle():
                return


@settings(max_examples=300)
@given(networks(), st.sampled_from(["1f1b", "gpipe"]))
def test_the_engine_does_what_the_policy_says(network: Network, schedule: str) -> None:
    plain = Plain(network, schedule)
    plain.play()
    played = simulate(*network[:4], schedule, network.limits)
    for s, i in plain.places:
        assert played.finish[s][i] == pytest.approx(plain.free[s, i], rel=1e-9)
        assert played.in_flight[s][i] == plain.most_held[s, i]
    assert played.seconds == max(map(max, played.finish))


@given(networks(), st.sampled_from(["1f1b", "gpipe"]))
def test_every_micro_batch_finishes_everywhere_within_limits(network: Network, schedule: str) -> None:
    workers, routes, onward, back, limits = network
    played = simulate(workers, routes, onward, back, schedule, limits)
    for s, row in enumerate(workers):
        for i, worker in enumerate(row):
            count = routes[s].count(i)
            assert played.finish[s][i] >= count * (worker.forward + worker.backward) * (1 - 1e-9)
            assert 1 <= played.in_flight[s][i] <= count
            assert played.transfer[s][i] <= played.finish[s][i] * (1 + 1e-9)
    for m in range(len(routes[0])):
        way = [workers[s][routes[s][m]] for s in range(len(workers))]
        alone = sum(worker.forward + worker.backward for worker in way)
        pairs = [(routes[s][m], routes[s + 1][m]) for s in range(len(workers) - 1)]
        alone += sum(row[pair].occupancy + row[pair].latency for rows in (onward, back) for row, pair in zip(rows, pairs, strict=True))
        assert played.seconds >= alone * (1 - 1e-9)


def test_a_replica_takes_the_earliest_micro_batch_of_those_that_arrived() -> None:
    """Micro-batch 1 comes from the faster replica and is first; 0, which was sent before 2 could be, goes before it."""
    workers = [[StageReplica(3.0, 0.1, 0), StageReplica(1.0, 0.1, 1)], [StageReplica(4.0, 0.1, 2)]]
    hop = Hop(0.0, 0.0, -1)
    played = simulate(workers, [(0, 1, 1), (0, 0, 0)], [{(0, 0): hop, (1, 0): hop}], [{(0, 0): hop, (1, 0): hop}], "gpipe", [9, 9, 9])
    assert played.finish[1] == pytest.approx([1 + 12 + 0.3])
    assert played.finish[0] == pytest.approx([1 + 12 + 0.1 + 0.1, 1 + 12 + 0.3 + 0.1])


def test_transfers_of_a_sender_queue_for_its_link() -> None:
    workers = [[StageReplica(1.0, 1.0, 0)], [StageReplica(1.0, 1.0, 1), StageReplica(1.0, 1.0, 2)]]
    hop, nothing = Hop(5.0, 0.5, 0), Hop(0.0, 0.0, -1)
    played = simulate(workers, [(0, 0), (0, 1)], [{(0, 0): hop, (0, 1): hop}], [{(0, 0): nothing, (0, 1): nothing}], "1f1b", [2, 1, 1])
    assert played.finish[1] == pytest.approx([1 + 5 + 0.5 + 2, 1 + 5 + 5 + 0.5 + 2])
