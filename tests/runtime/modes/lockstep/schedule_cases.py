"""Random workers: columns, unequal replica counts, virtual stages, and anything at all."""

import random

from hypothesis import strategies as st

from atoll.runtime.modes.lockstep.schedule import Workers

SCHEDULES = st.sampled_from(["gpipe", "1f1b", "interleaved"])


def column(depth: int, micro_batches: int, rounds: int = 1) -> Workers:
    """One column whose stages go round `depth` workers, `rounds` times."""
    stages = depth * rounds
    return Workers(tuple((s % depth,) for s in range(stages)), ((0,) * micro_batches,) * stages)


def _routes(draw: st.DrawFn, homes: list[tuple[int, ...]], micro_batches: int) -> Workers:
    rows = [tuple(draw(st.lists(st.integers(0, len(row) - 1), min_size=micro_batches, max_size=micro_batches))) for row in homes]
    return Workers(tuple(homes), tuple(rows))


@st.composite
def columns(draw: st.DrawFn) -> Workers:
    """Stages that divide micro-batches alike, each on workers of its own."""
    stages, width, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    route = tuple(draw(st.lists(st.integers(0, width - 1), min_size=micro_batches, max_size=micro_batches)))
    return Workers(tuple(tuple(range(s * width, (s + 1) * width)) for s in range(stages)), (route,) * stages)


@st.composite
def one_stage_each(draw: st.DrawFn) -> Workers:
    """Stages with different numbers of replicas."""
    homes: list[tuple[int, ...]] = []
    first = 0
    for width in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)):
        homes.append(tuple(range(first, first + width)))
        first += width
    return _routes(draw, homes, draw(st.integers(1, 8)))


@st.composite
def anything(draw: st.DrawFn) -> Workers:
    """Workers with any stages, in any order."""
    rows = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), min_size=1, max_size=5))
    number = {worker: index for index, worker in enumerate(sorted({worker for row in rows for worker in row}))}
    return _routes(draw, [tuple(number[worker] for worker in row) for row in rows], draw(st.integers(1, 6)))


any_workers = st.one_of(columns(), one_stage_each(), anything())


def random_workers(numbers: random.Random) -> Workers:
    """As `any_workers`, larger and faster: for tests of many cases."""
    kind = numbers.choice(["columns", "one stage each", "virtual stages", "anything"])
    rounds = numbers.randint(1, 3) if kind in ("columns", "virtual stages") else 1
    width = numbers.randint(1, 3) if kind == "columns" else 0
    homes: list[tuple[int, ...]] = []
    for _ in range(numbers.randint(1, 4)):
        first = homes[-1][-1] + 1 if homes else 0
        homes.append(tuple(range(first, first + (width or numbers.randint(1, 3)))))
    if kind == "anything":
        rows = [numbers.sample(range(5), numbers.randint(1, 4)) for _ in range(numbers.randint(1, 6))]
        number = {worker: index for index, worker in enumerate(sorted({worker for row in rows for worker in row}))}
        homes = [tuple(number[worker] for worker in row) for row in rows]
    micro_batches = numbers.randint(1, 10)
    routes = [tuple(numbers.randrange(len(row)) for _ in range(micro_batches)) for row in homes]
    return Workers(tuple(homes) * rounds, (tuple(routes) if kind != "columns" else (routes[0],) * len(homes)) * rounds)
