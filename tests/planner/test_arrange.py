"""Arrangements: every slot at most once, every stage served, columns of sites kept apart."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.planner.arrange import arrange, device_classes, site_columns, slots_of

KINDS = ("A100-40GB", "V100-32GB", "RTX-3090")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    sites = []
    for i in range(draw(st.integers(1, 4))):
        groups = [(kind, draw(st.integers(1, 4))) for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True))]
        sites.append(make_site(f"s{i}", kind=groups, hosts=draw(st.integers(1, 3))))
    return make_cluster("c", sites, default_link=("1 Gbit/s", "10 ms"))


@given(clusters(), st.integers(1, 4))
def test_slots_are_disjoint_and_alike(cluster: Cluster, size: int) -> None:
    classes = device_classes(cluster)
    assert sum(each.size for each in classes) == len(cluster.devices)
    slots = slots_of(classes, size)
    names = [name for slot in slots for name in slot.devices]
    assert len(names) == len(set(names))
    for slot in slots:
        assert len(slot.devices) == size
        assert len({(cluster.device(name).kind.name, cluster.device(name).site) for name in slot.devices}) == 1


@given(clusters(), st.integers(1, 5), st.booleans(), st.booleans())
def test_every_stage_is_served_once(cluster: Cluster, stages: int, mixed: bool, reverse: bool) -> None:
    classes = device_classes(cluster)
    slots = slots_of(classes, 1)
    sites = [site.name for site in cluster.sites]
    ways = site_columns(cluster, sites)
    assert len(ways) == len(sites)
    for columns in ways:
        assert sorted(site for column in columns for site in column) == sorted(sites)
        found = arrange(slots, classes, columns, stages, lambda kind: 1.0 + kind, mixed, reverse)
        smallest = min(sum(classes[slot.kind].device.site in column for slot in slots) for column in columns)
        if smallest < stages:
            assert found is None
            continue
        if found is None:
            continue
        used = [slot for stage in found for slot in stage]
        assert len(used) == len(set(used)) == len(slots)
        assert all(found)
        for column in columns:  # a column holds the whole row of stages
            for stage in found:
                assert any(classes[slot.kind].device.site in column for slot in stage)
