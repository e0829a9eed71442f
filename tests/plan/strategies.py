"""Random plans: any at all for the round trips, and valid ones with their graph and cluster for everybody else."""

from typing import get_args

from hypothesis import strategies as st

from atoll.plan import CodecName, Mode, Plan, Replica, Schedule, Stage

_HOSTS = st.sampled_from(["oslo-0", "oslo-1", "node007", "node008", "node10", "10.0.0.1", "a b", "x[1]", 'quo"te', "", "#", "münchen"])
names = st.one_of(
    st.text(max_size=8),
    st.text(alphabet="a-/01289", max_size=6),
    st.builds(lambda host, index: f"{host}/{index}", _HOSTS, st.integers(0, 12)),
)
numbers = st.integers(-3, 300)


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
)
any_plans = st.builds(
    Plan,
    graph=names,
    cluster=names,
    batch_size=numbers,
    micro_batch_size=numbers,
    stages=st.lists(stages, max_size=4).map(tuple),
    mode=st.sampled_from(get_args(Mode)),
    schedule=st.sampled_from(get_args(Schedule)),
    codecs=st.dictionaries(names, st.sampled_from(get_args(CodecName)), max_size=4),
    outer_steps=numbers,
    staleness=numbers,
)
