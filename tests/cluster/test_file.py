"""Cluster files: good ones load, every kind of bad one is refused with file, place, key and remedy."""

import contextlib
import copy
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster import Cluster, catalogue, dump_cluster, load_cluster, parse_cluster
from atoll.errors import ClusterError

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.toml"))

GOOD = """
name = "two sites"
[[site]]
name = "oslo"
network = { bandwidth = "25 Gbit/s", latency = "50 us" }
preemptions = "0.05 /h"
  [[site.host]]
  name = "o"
  count = 2
  devices = [{ kind = "V100-32GB", count = 2 }, { kind = "X", memory = "20 GB", speed = 0.5 }]
  link = { bandwidth = "150 GB/s", latency = "5 us" }
  price = "$2.48/h"
[[site]]
name = "rome"
  [[site.host]]
  devices = [{ kind = "T4" }]
  memory_reserve = 0.1
[[link]]
between = ["oslo", "rome"]
bandwidth = "200 Mbit/s"
latency = "40 ms"
price = "$0.02/GB"
[[device_kind]]
name = "X"
memory = "24 GB"
memory_bandwidth = "600 GB/s"
flops = { fp32 = "20 TFLOPS", bf16 = "80 TFLOPS" }
link = { bandwidth = "16 GB/s" }
cpu = true
source = "somewhere"
[device_kind.measured]
threads = 2
operator = "3 us"
matmul = [{ precision = "fp32", rows = 64, columns = 64, depth = 64, rate = "50 GFLOPS" }]
conv = [{ precision = "fp32", batch = 1, inputs = 3, outputs = 8, size = 32, kernel = 3, rate = "40 GFLOPS" }]
memory = [{ size = "64 kB", rate = "20 GB/s" }]
"""


def test_a_good_file_says_what_it_says():
    cluster = parse_cluster(GOOD)
    assert [device.name for device in cluster.devices] == ["o-0/0", "o-0/1", "o-0/2", "o-1/0", "o-1/1", "o-1/2", "rome-0/0"]
    v100, _, x, *_, t4 = cluster.devices
    assert v100.kind is catalogue()["V100-32GB"]
    assert (v100.site, v100.host, v100.preemptions_per_hour, v100.price_per_hour) == ("oslo", "o-0", 0.05, 2.48)
    assert v100.memory_bytes == pytest.approx(0.95 * 32 * 2**30)
    assert (x.memory_bytes, x.speed, x.kind.peak("bf16")) == (20e9, 0.5, 80e12)
    assert x.kind.measured is not None
    assert x.kind.measured.matmul[0].flops_per_s == 50e9
    assert x.kind.measured.conv[0].size == 32
    assert x.kind.measured.memory[0].bytes == 64e3
    assert t4.memory_bytes == pytest.approx(0.9 * 15 * 2**30)
    link = cluster.link_between(v100, t4)
    assert (link.name, link.bytes_per_s, link.latency_s, link.price_per_byte) == ("oslo–rome", 25e6, 0.04, 0.02 / 1e9)
    assert cluster.link_between(v100, x).bytes_per_s == 150e9


REACHED = """
name = "office"
[[site]]
name = "office"
network = { bandwidth = "1 Gbit/s", latency = "1 ms" }
  [[site.host]]
  name = "desk"
  address = "localhost"
  devices = [{ kind = "T4" }]
  [[site.host]]
  name = "lab"
  count = 2
  address = ["gpu1.example.org", "fe80::1%eth0"]
  user = "me"
  python = "~/venv/bin/python"
  workdir = "~/train"
  devices = [{ kind = "T4" }]
"""


def test_how_hosts_are_reached_is_read_and_written():
    cluster = parse_cluster(REACHED)
    assert [(host.name, host.address, host.user, host.python, host.workdir) for host in cluster.hosts] == [
        ("desk", "localhost", "", "", ""),
        ("lab-0", "gpu1.example.org", "me", "~/venv/bin/python", "~/train"),
        ("lab-1", "fe80::1%eth0", "me", "~/venv/bin/python", "~/train"),
    ]
    assert parse_cluster(dump_cluster(cluster)) == cluster


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('address = "localhost"', 'user = "me"', "user: is for hosts that are reached over ssh; give the host an address too"),
        ('"localhost"', '"me@desk"', "address: is a host without a user: write address = 'desk' and user = 'me'"),
        ('"localhost"', '"-oProxyCommand=sh"', "address: must be a host's name or IP address"),
        ('"localhost"', "7", "address: must be a host's name or IP address, like 'gpu1.example.org', got 7"),
        ('["gpu1.example.org", "fe80::1%eth0"]', '"gpu1"', 'address: must be one for each of 2 hosts, like ["10.0.0.1", "10.0.0.2"]'),
        ("fe80::1%eth0", "gpu1.example.org", "address: is there twice; hosts alike are different machines"),
        ('user = "me"', 'user = "-lroot"', "user: must be a user's name, got '-lroot'"),
        ("~/train", "train", "workdir: must begin with / or ~/, got 'train'"),
        ("~/train", "/a\\nb", "workdir: must be one line of printable characters"),
    ],
)
def test_hosts_that_cannot_be_reached_so_are_refused(old, new, message):
    assert old in REACHED
    with pytest.raises(ClusterError) as error:
        parse_cluster(REACHED.replace(old, new, 1))
    assert message in str(error.value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_round_trip(path):
    cluster = Cluster.load(path)
    assert parse_cluster(dump_cluster(cluster)) == cluster
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_the_fleet_is_what_it_claims():
    fleet = load_cluster(ROOT / "examples" / "clusters" / "fleet.toml")
    assert (len(fleet.devices), len(fleet.sites), len({device.kind.name for device in fleet.devices})) == (1024, 8, 3)


def test_the_documentation_example_loads():
    text = (ROOT / "docs" / "cluster.md").read_text("utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        parse_cluster(block, "docs/cluster.md")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'kind = "V100-32GB"',
            'kind = "V100-32G"',
            "site 'oslo' › host 'o' › devices[0] › kind: unknown accelerator 'V100-32G'; did you mean 'V100-32GB'?",
        ),
        ('bandwidth = "200 Mbit/s"', 'bandwidth = "-3 Mbit/s"', "link 'oslo'–'rome' › bandwidth: must be positive, got '-3 Mbit/s'"),
        ('bandwidth = "200 Mbit/s"', 'bandwidth = "0 bit/s"', "link 'oslo'–'rome' › bandwidth: must be positive, got '0 bit/s'"),
        (
            'bandwidth = "200 Mbit/s"',
            "bandwidth = 200",
            "link 'oslo'–'rome' › bandwidth: must be text with a unit, like '200 Mbit/s', got 200",
        ),
        (
            'bandwidth = "200 Mbit/s"',
            'bandwidth = "200 Mbit"',
            "cannot read '200 Mbit' as a bandwidth; write it like '200 Mbit/s' or '25 GB/s'",
        ),
        ('bandwidth = "200 Mbit/s"', 'bandwith = "200 Mbit/s"', "link 'oslo'–'rome' › bandwith: unknown key; did you mean 'bandwidth'?"),
        ('bandwidth = "200 Mbit/s"\n', "", "link 'oslo'–'rome' › bandwidth: missing; write bandwidth = \"200 Mbit/s\""),
        ('bandwidth = "200 Mbit/s"', 'bandwidth = "1e999 Mbit/s"', "link 'oslo'–'rome' › bandwidth: 1e999 is too large to be a number"),
        ('bandwidth = "200 Mbit/s"', 'bandwidth = "9 Ebit/s"', "link 'oslo'–'rome' › bandwidth: must be between 1 kbit/s and 1 Pbit/s"),
        ('latency = "40 ms"', 'latency = "40 h"', "link 'oslo'–'rome' › latency: must be between 0 s and 60 s, got '40 h'"),
        (
            'between = ["oslo", "rome"]',
            'between = ["oslo", "roma"]',
            "link 'oslo'–'roma' › between: unknown site 'roma'; did you mean 'rome'?",
        ),
        ('between = ["oslo", "rome"]', 'between = ["oslo", "oslo"]', "must be two different sites"),
        ('between = ["oslo", "rome"]', 'between = ["oslo"]', "link[0] › between: must be the names of two sites"),
        ('between = ["oslo", "rome"]', "between = 3", "link[0] › between: must be the names of two sites"),
        ('name = "rome"', 'name = "oslo"', "link 'oslo'–'rome' › between: unknown site 'rome'"),
        ('name = "rome"', "name = 5", "site[1] › name: must be text, like 'oslo', got 5"),
        ('name = "rome"', 'name = "ro/me"', "site 'ro/me' › name: must be made of letters, digits"),
        ('name = "o"', 'name = "rome"', "site 'rome' › host 'rome-0': another host has this name"),
        ('name = "o"\n  count = 2', 'name = "rome"', "site 'oslo' › host 'rome': another site has this name"),
        ("count = 2 }", "count = 0 }", "site 'oslo' › host 'o' › devices[0] › count: must be between 1 and 1000000, got 0"),
        ("count = 2 }", "count = 1.5 }", "devices[0] › count: must be a whole number, got 1.5"),
        ("count = 2 }", "count = true }", "devices[0] › count: must be a whole number, got true"),
        ("count = 2\n", "count = 1000000\n", "site 'oslo' › host 'o': the cluster would have more than 1,000,000 devices"),
        ("speed = 0.5", "speed = nan", "devices[1] › speed: must be between 1e-06 and 10, got nan"),
        ("speed = 0.5", "speed = 0", "devices[1] › speed: must be between 1e-06 and 10, got 0"),
        ("speed = 0.5", 'speed = "fast"', "devices[1] › speed: must be a number, got 'fast'"),
        ("speed = 0.5", "memory_reserve = 0.1", "devices[1] › memory_reserve: give either memory"),
        ('memory = "24 GB"', 'memory = "24 EB"', "device_kind 'X' › memory: must be between 1 MB and 1 PB, got '24 EB'"),
        ('fp32 = "20 TFLOPS", ', "", "device_kind 'X' › flops › fp32: missing"),
        ("cpu = true", "cpu = 1", "device_kind 'X' › cpu: must be true or false, got 1"),
        ("bf16 =", "bf17 =", "device_kind 'X' › flops › bf17: unknown key; did you mean 'bf16'?"),
        (
            'precision = "fp32", rows',
            'precision = "fp33", rows',
            "device_kind 'X' › measured › matmul[0] › precision: unknown precision 'fp33'",
        ),
        ("rows = 64", "rows = -64", "device_kind 'X' › measured › matmul[0] › rows: must be between 1 and"),
        ('devices = [{ kind = "T4" }]', "devices = []", "site 'rome' › host[0] › devices: is empty; write devices ="),
        ('devices = [{ kind = "T4" }]', "", "site 'rome' › host[0] › devices: missing; write devices ="),
        ('devices = [{ kind = "T4" }]', 'devices = "T4"', "site 'rome' › host[0] › devices: must be a list of tables, got 'T4'"),
        ('devices = [{ kind = "T4" }]', 'devices = ["T4"]', "site 'rome' › host[0] › devices[0]: must be a table"),
        ('network = { bandwidth = "25 Gbit/s", latency = "50 us" }\n', "", "site 'oslo' › network: missing; write network ="),
        ('network = { bandwidth = "25 Gbit/s", latency = "50 us" }', 'network = "25 Gbit/s"', "site 'oslo' › network: must be a table"),
        ('price = "$2.48/h"', 'price = "2.48"', "site 'oslo' › host 'o' › price: cannot read '2.48' as a price per hour"),
        ("[[link]]", "[link]", "link: must be a list of tables; write [[link]] for each"),
        ('name = "two sites"', 'nam = "two sites"', "c.toml: nam: unknown key; did you mean 'name'?"),
        ('name = "two sites"', 'name = ""', "c.toml: name: must be text"),
        ('name = "two sites"', 'name = "two', "c.toml: line 2, column 12: not valid TOML"),
        ('name = "two sites"', "name = " + "[" * 5000, "c.toml: "),
        ('name = "two sites"', "name = " + "9" * 5000, "c.toml: "),
    ],
)
def test_bad_files_are_refused_exactly(old, new, message):
    assert old in GOOD
    with pytest.raises(ClusterError) as caught:
        parse_cluster(GOOD.replace(old, new, 1), "c.toml")
    assert str(caught.value).startswith("c.toml: ")
    assert message in str(caught.value)


def test_what_is_there_twice_or_not_at_all():
    with pytest.raises(ClusterError, match="site 'oslo': another site has this name"):
        parse_cluster(
            GOOD.replace('["oslo", "rome"]', '["oslo", "oslo2"]').replace('name = "rome"', 'name = "oslo2"')
            + '[[site]]\nname = "oslo"\n[[site.host]]\ndevices = [{kind = "T4"}]'
        )
    extra = '[[link]]\nbetween = ["rome", "oslo"]\nbandwidth = "1 Gbit/s"\nlatency = "1 ms"\n'
    with pytest.raises(ClusterError, match=r"c.toml: link 'rome'–'oslo': is there twice"):
        parse_cluster(GOOD + extra, "c.toml")
    third = '[[site]]\nname = "bonn"\n[[site.host]]\ndevices = [{kind = "T4"}]\n'
    with pytest.raises(ClusterError, match="link 'oslo'–'bonn': missing"):
        parse_cluster(GOOD + third)
    assert len(parse_cluster(GOOD + third + '[default_link]\nbandwidth = "1 Gbit/s"\nlatency = "1 ms"\n').links) == 3
    with pytest.raises(ClusterError, match=r"site: missing; write \[\[site\]\]"):
        parse_cluster("")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ClusterError, match=r"none.toml: there is no such file"):
        load_cluster(tmp_path / "none.toml")
    with pytest.raises(ClusterError, match="is a directory"):
        load_cluster(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'# ok\nname = "\xe9"')
    with pytest.raises(ClusterError, match=r"latin.toml: line 2: is not UTF-8"):
        load_cluster(tmp_path / "latin.toml")
    with pytest.raises(ClusterError, match="cannot be read"):
        load_cluster("nul\0byte.toml")
    (tmp_path / "mine.toml").write_text('[[site]]\nname = "s"\n[[site.host]]\ndevices = [{kind = "T4"}]\n')
    assert load_cluster(str(tmp_path / "mine.toml")).name == "mine"


def _paths(value, path=()):
    """Every place in a nested document."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _paths(child, (*path, key))


def _toml(value) -> str:
    """A document as TOML, all inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in value) + '"'
    return repr(value)


JUNK = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.just([]),
    st.just({}),
    st.just([{}]),
    st.just(["oslo", "rome"]),
    st.sampled_from(["0 s", "-1 GB", "1e308 GB/s", "1e-300 B", "$0/h", "1 /h", "o", "T4", "X", "oslo", "fp16"]),
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_change_to_a_file_gives_a_cluster_or_a_cluster_error(data):
    import tomllib

    document = copy.deepcopy(tomllib.loads(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        paths = list(_paths(document))
        if not paths:
            break
        *parents, key = data.draw(st.sampled_from(paths))
        place = document
        for step in parents:
            place = place[step]
        action = data.draw(st.sampled_from(["delete", "junk", "rename", "duplicate"]))
        if action == "delete":
            del place[key]
        elif action == "junk":
            place[key] = copy.deepcopy(data.draw(JUNK))
        elif action == "rename" and isinstance(place, dict):
            place[data.draw(st.text("abcdefgh_", min_size=1, max_size=8))] = place.pop(key)
        elif isinstance(place, list):
            place.append(copy.deepcopy(place[key]))
    text = "\n".join(f"{_toml(str(key))} = {_toml(value)}" for key, value in document.items())
    with contextlib.suppress(ClusterError):
        cluster = parse_cluster(text, "c.toml")
        assert cluster.devices
        try:
            again = parse_cluster(dump_cluster(cluster))
        except ClusterError as error:
            pytest.fail(f"what was written cannot be read: {error}")
        assert again == cluster


@given(text=st.text(max_size=60))
def test_any_text_gives_a_cluster_or_a_cluster_error(text):
    with contextlib.suppress(ClusterError):
        parse_cluster(text)
