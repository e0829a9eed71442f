"""What is in force after any sequence of faults, and what it means."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.lab import LabFault, parse_fault
from atoll.lab.faults import Conditions
from tests.lab.clusters import two_sites
from tests.lab.test_faults import faults

CLUSTER = two_sites()


def after(*lines: str) -> Conditions:
    conditions = Conditions()
    for line in lines:
        conditions = conditions.after(parse_fault(f"0s {line}", CLUSTER))
    return conditions


@given(st.lists(faults(), max_size=8))
def test_restoring_ends_everything(script: list[LabFault]) -> None:
    conditions = Conditions()
    for fault in script:
        conditions = conditions.after(fault)
    assert conditions.after(LabFault(kind="restore")) == Conditions()


@given(st.lists(faults(), max_size=8), faults())
def test_a_fault_that_is_over_leaves_the_others(script: list[LabFault], fault: LabFault) -> None:
    conditions = Conditions()
    for one in script:
        conditions = conditions.after(one)
    if fault.kind != "restore":
        assert conditions.after(fault).without(fault) == conditions.without(fault)
        assert conditions.after(fault).after(fault) == conditions.after(fault)


def test_what_conditions_mean() -> None:
    conditions = after("cut rome-0", "slow rome oslo 10", "slow oslo-0 4", "loss oslo-1 5%", "one-way-cut oslo-0 rome-1")
    assert not conditions.connected("rome-0")
    assert conditions.connected("rome-1")
    assert (conditions.slowdown("oslo", "rome"), conditions.slowdown("oslo-0"), conditions.slowdown("rome-0")) == (10, 4, 1)
    assert (conditions.loss("oslo-1"), conditions.loss("oslo", "rome")) == (0.05, 0)
    assert conditions.blocked(CLUSTER) == {("oslo-0", "rome-1")}


def test_a_site_is_cut_off_from_all_others_and_two_places_from_each_other() -> None:
    assert after("cut rome").blocked(CLUSTER) == {("rome", "oslo"), ("oslo", "rome")}
    assert after("cut rome-0 oslo").blocked(CLUSTER) == {("rome-0", "oslo"), ("oslo", "rome-0")}


def test_restoring_a_place_ends_what_concerns_it_and_two_what_is_between_them() -> None:
    both = after("cut rome-0", "cut rome-0 oslo-0", "cut oslo-0")
    assert after("cut oslo-0") == both.after(LabFault(kind="restore", places=("rome-0",)))
    assert after("cut rome-0", "cut oslo-0") == both.after(LabFault(kind="restore", places=("oslo-0", "rome-0")))
