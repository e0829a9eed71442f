"""`atoll probe`: what is wrong is said before anything is measured; what was measured is shown, written and served."""

import json

import pytest
import typer
from typer.testing import CliRunner

from atoll.cli import probe as command
from atoll.cluster import Cluster, load_cluster, parse_cluster
from atoll.cluster.peer import PeerLink, listen
from atoll.errors import ClusterError

APP = typer.Typer()
APP.command()(command.probe)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "nowhere"], "must be HOST:PORT"),
        (["-o", "no/such/directory/here.toml"], "there is no directory"),
        (["-o", "."], "is a directory"),
    ],
)
def test_mistakes_are_told_before_measuring(arguments, message):
    result = CliRunner().invoke(APP, arguments)
    assert isinstance(result.exception, ClusterError)
    assert message in str(result.exception)


def test_a_taken_port_and_an_absent_peer_are_told_before_measuring():
    with listen(0) as server:
        result = CliRunner().invoke(APP, ["--serve", str(server.getsockname()[1])])
        assert "cannot listen" in str(result.exception)
    with listen(0, "127.0.0.1") as server:
        port = server.getsockname()[1]
    result = CliRunner().invoke(APP, ["--peer", f"127.0.0.1:{port}"])
    assert "connection refused" in str(result.exception)


HERE = """
[[site]]
name = "here"
  [[site.host]]
  name = "box"
  devices = [{ kind = "cpu", memory = "7 GB" }]
[[device_kind]]
name = "cpu"
memory = "8 GB"
memory_bandwidth = "9 GB/s"
flops = { fp32 = "90 GFLOPS" }
[device_kind.measured]
threads = 2
operator = "3 us"
matmul = [
  { precision = "fp32", rows = 1024, columns = 64, depth = 32, rate = "50 GFLOPS" },
  { precision = "fp32", rows = 2048, columns = 64, depth = 32, rate = "51 GFLOPS" },
  { precision = "bf16", rows = 1024, columns = 64, depth = 32, rate = "5 GFLOPS" },
]
conv = [{ precision = "fp32", batch = 1, inputs = 3, outputs = 8, size = 32, kernel = 3, rate = "40 GFLOPS" }]
memory = [{ size = "64 kB", rate = "20 GB/s" }]
"""
LINK = PeerLink("node:7", 0.04, 25e6, 5e6, HERE)


def test_what_was_measured_is_shown(capsys):
    here = parse_cluster(HERE)
    command._show(here.devices[0].kind, here, [LINK])
    shown = capsys.readouterr().out
    for piece in ("cpu", "8 GB", "7 GB", "3 µs", "50 GFLOP/s", "too slow", "200 Mbit/s there, 40 Mbit/s back, round trip 40 ms"):
        assert piece in shown


def test_json_has_the_cluster_and_the_peers(capsys):
    here = parse_cluster(HERE)
    command.print_json(command._document(here, [LINK]))
    document = json.loads(capsys.readouterr().out)
    assert Cluster.from_json(json.dumps(document["cluster"])) == here
    assert document["peers"] == [
        {"address": "node:7", "round_trip_seconds": 0.04, "there_bytes_per_second": 25e6, "back_bytes_per_second": 5e6}
    ]


def test_the_file_is_written(tmp_path):
    command._write(tmp_path / "here.toml", HERE)
    assert load_cluster(tmp_path / "here.toml").devices[0].memory_bytes == 7e9
    with pytest.raises(ClusterError, match="cannot be written: Is a directory"):
        command._write(tmp_path, HERE)


def test_progress_is_told_in_plain_lines_where_there_is_no_terminal(capsys):
    with command._progress("measuring") as tick:
        for share in (0.1, 0.26, 0.3, 0.5, 0.99, 1.0):
            tick(share)
    assert capsys.readouterr().err.splitlines() == ["measuring …", "measuring: 25%", "measuring: 50%", "measuring: 75%"]
