"""What each site of a plan runs where sites train by themselves, and what they cannot run."""

import pytest

from atoll.cluster import Cluster
from atoll.cluster.file import parse_cluster
from atoll.errors import PlanError
from atoll.plan import parse_plan
from atoll.plan.sites import site_parts

TEXT = """name = "c"
[[site]]
name = "oslo"
network = { bandwidth = "1 Gbit/s", latency = "1 ms" }
  [[site.host]]
  name = "a"
  devices = [{ kind = "T4", count = 2 }]
[[site]]
name = "rome"
network = { bandwidth = "1 Gbit/s", latency = "1 ms" }
  [[site.host]]
  name = "b"
  devices = [{ kind = "T4", count = 2 }]
[[link]]
between = ["oslo", "rome"]
bandwidth = "1 Gbit/s"
latency = "1 ms"
"""
HEAD = "plan v1 graph=g cluster=c mode=islands batch=8 micro_batch=4\n"


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return parse_cluster(TEXT)


def test_a_site_runs_its_replicas_on_its_part_of_the_batch(cluster: Cluster) -> None:
    plan = parse_plan(f"{HEAD}stage 0: layers 0-1: a/0=3 b/0=5\nstage 1: layers 2-3: b/1=5 a/1=3\n")
    oslo, rome = site_parts(plan, cluster)
    assert [(part.site, part.start, part.stop, part.plan.mode) for part in (oslo, rome)] == [
        ("oslo", 0, 3, "lockstep"),
        ("rome", 3, 8, "lockstep"),
    ]
    assert (oslo.plan.batch_size, oslo.plan.micro_batch_size, rome.plan.batch_size, rome.plan.micro_batch_size) == (3, 3, 5, 4)
    assert [stage.devices for stage in rome.plan.stages] == [("b/0",), ("b/1",)]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("stage 0: layers 0-3: (a/0 b/0)=4*2\n", "stage 0: a replica is on devices of oslo and rome"),
        ("stage 0: layers 0-1: a/0=4 b/0=4\nstage 1: layers 2-3: a/1=8\n", "stage 1: rome has no samples of it"),
        ("stage 0: layers 0-1: a/0=4 b/0=4\nstage 1: layers 2-3: a/1=3 b/1=5\n", "stage 1: oslo takes 3 samples here and 4 before"),
        ("stage 0: layers 0-3: a/0=4 a/1=4\n", "the plan's devices are all at one site"),
        ("stage 0: layers 0-3: a/0=4 z/1=4\n", "the plan names z/1, which c does not have"),
    ],
)
def test_what_no_site_can_train_by_itself_is_refused(stages: str, said: str, cluster: Cluster) -> None:
    with pytest.raises(PlanError, match=said):
        site_parts(parse_plan(HEAD + stages), cluster)
