"""The language of faults: it prints as it is written, TOML says the same, and what makes no sense is refused with a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import LabError
from atoll.lab import LabFault, load_faults, parse_fault, parse_faults
from atoll.lab.faults import check_fault
from tests.lab.clusters import two_sites

CLUSTER = two_sites()
HOSTS, SITES = ["oslo-0", "oslo-1", "rome-0", "rome-1"], ["oslo", "rome"]
SECONDS = st.floats(0, 1e5, allow_nan=False)


@st.composite
def faults(draw: st.DrawFn) -> LabFault:
    """Any fault that makes sense in the cluster."""
    kind = draw(st.sampled_from(["kill", "stop", "continue", "cut", "one-way-cut", "slow", "loss", "restore"]))
    anywhere = st.sampled_from(HOSTS + SITES)
    links = st.one_of(st.tuples(st.sampled_from(HOSTS)), st.permutations(SITES).map(tuple))
    two = st.lists(anywhere, min_size=2, max_size=2, unique=True).map(tuple)
    one = st.tuples(anywhere)
    places = {"cut": st.one_of(one, two), "one-way-cut": two, "slow": links, "loss": links, "restore": st.one_of(st.just(()), one, two)}
    amount = {"slow": st.floats(1e-3, 1e6), "loss": st.floats(0, 1)}.get(kind, st.none())
    lasts = st.none() if kind in ("continue", "restore") else st.none() | SECONDS
    return LabFault(
        kind=kind, places=draw(places.get(kind, one)), at_seconds=draw(SECONDS), amount=draw(amount), duration_seconds=draw(lasts)
    )


@given(faults())
def test_a_fault_reads_back_as_it_prints(fault: LabFault) -> None:
    check_fault(fault, CLUSTER)
    assert parse_fault(str(fault), CLUSTER) == fault


def test_toml_says_the_same_in_the_order_of_time() -> None:
    text = """
    fault = [
      { at = "2 min", kind = "restore" },
      { at = "30s", kind = "kill", host = "rome-0", duration = "10 s" },
      { at = "40 s", kind = "one-way cut", from = "oslo-0", to = "rome" },
      { at = "50 s", kind = "slow", between = ["oslo", "rome"], factor = 10 },
      { at = "60 s", kind = "loss", host = "oslo-1", share = "1%" },
      { at = "70 s", kind = "cut", site = "rome" },
    ]"""
    lines = [
        "30s kill rome-0 for 10s",
        "40s one-way-cut oslo-0 rome",
        "50s slow oslo rome 10",
        "60s loss oslo-1 1%",
        "70s cut rome",
        "2min restore",
    ]
    assert parse_faults(text, CLUSTER) == tuple(parse_fault(line, CLUSTER) for line in lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "write it like"),
        ("soon cut rome-0", "cannot read 'soon' as a time"),
        ("-3s cut rome-0", "must not be negative"),
        ("3s break rome-0", "no kind of fault is called 'break'"),
        ("3s cut paris", "no host or site 'paris'"),
        ("3s cut", "needs the names of 1 or 2"),
        ("3s cut rome rome", "2 different hosts or sites"),
        ("3s one-way-cut rome", "needs the names of 2"),
        ("3s slow oslo rome", "a factor such as 10, not 'rome'"),
        ("3s slow oslo 10", "one host's interface or of the link of two sites"),
        ("3s slow oslo-0 rome-0 10", "one host's interface or of the link of two sites"),
        ("3s slow oslo-0 0", "a factor by which"),
        ("3s loss oslo-0 150%", "from 0 to 1"),
        ("3s restore rome for 3s", "has no duration"),
        ("3s cut rome for ever", "the duration"),
    ],
)
def test_nonsense_is_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(LabError) as refused:
        parse_fault(text, CLUSTER)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("at = '3s'", "kind is missing"),
        ("at = 3\nkind = 'cut'\nhost = 'rome-0'", "a time as text"),
        ("at = '3s'\nkind = 'cut'\nhosts = 'rome-0'", "unknown key 'hosts'"),
        ("at = '3s'\nkind = 'cut'\nhost = 'rome-0'\nsite = 'rome'", "say where once"),
        ("at = '3s'\nkind = 'one-way-cut'\nfrom = 'rome-0'", "say where once"),
        ("at = '3s'\nkind = 'cut'\nbetween = ['rome']", "must name two"),
        ("at = '3s'\nkind = 'kill'\nhost = 'rome-0'\nfactor = 3", "takes no number"),
    ],
)
def test_nonsense_in_a_file_is_refused_with_the_place(entry: str, reason: str) -> None:
    with pytest.raises(LabError, match=r"^f\.toml: fault 2: ") as refused:
        parse_faults(f"[[fault]]\nat = '1s'\nkind = 'cut'\nhost = 'rome-0'\n[[fault]]\n{entry}", CLUSTER, "f.toml")
    assert reason in str(refused.value)


def test_files_that_are_none_are_refused(tmp_path: object) -> None:
    for text in ("=", "fault = 3", "[other]\na = 1"):
        with pytest.raises(LabError):
            parse_faults(text, CLUSTER)
    with pytest.raises(LabError, match="cannot be read"):
        load_faults(f"{tmp_path}/none.toml", CLUSTER)
