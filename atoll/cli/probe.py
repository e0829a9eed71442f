"""`atoll probe`: measure this machine, and the links to others, into a cluster file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from atoll import units
from atoll.cli.output import check_writable, print_json, say
from atoll.cli.render import show
from atoll.cluster import Cluster, DeviceKind, MatmulRate, dump_cluster
from atoll.errors import ClusterError

if TYPE_CHECKING:
    from atoll.cluster.peer import PeerLink

__all__ = ["probe"]

_BUSY = 1.3
_ALONE = """# One host, so its site needs no network. To add others, say what joins them,
# network = { bandwidth = "10 Gbit/s", latency = "50 us" }, and write a [[site.host]] for each.
"""


def probe(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the cluster file here.", metavar="FILE")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer measurements: about 15 s instead of 50 s.")] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="Also measure the link to a host where `atoll probe --serve PORT` runs.", metavar="HOST:PORT"),
    ] = None,
    serve: Annotated[
        int | None,
        typer.Option("--serve", help="After measuring, answer the probes of other hosts on this port.", metavar="PORT", min=0, max=65535),
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads to use.", min=1, max=1024)] = None,
    processes: Annotated[
        int, typer.Option("--processes", help="Describe the CPU as so many devices that share its cores, one a process.", min=1, max=1024)
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine, and links to others, into a cluster file."""
    import torch  # takes a second, and `atoll --help` needs none of it

    from atoll.cluster.peer import listen, measure_peer, parse_address
    from atoll.cluster.probe import join_peers, probe_host

    for address in peer or []:
        parse_address(address)  # a slip of the pen should not cost a minute of measuring
    if output is not None:
        check_writable(output, ClusterError)
    if serve is not None:
        listen(serve).close()  # that a port is taken should be known now, not after measuring
    links: list[PeerLink] = []
    for address in peer or []:
        with _progress(f"measuring the link to {address}") as tick:
            links.append(measure_peer(address, tick))
    if processes > 1 and threads is not None:
        raise ClusterError("--threads: has no meaning with --processes, which divides the cores; leave one of them out")
    if processes > 1 and torch.accelerator.is_available():
        raise ClusterError("--processes: this machine has accelerators, and a process runs on each; leave it out")
    if threads is not None:
        torch.set_num_threads(threads)
    with _progress("measuring this machine") as tick:
        probed = probe_host(quick=quick, processes=processes, tick=tick)
    here = probed.cluster
    cluster = join_peers(here, links)
    if output is not None:
        _write(output, (_ALONE if len(cluster.hosts) == 1 else "") + dump_cluster(cluster))
    if as_json:
        print_json(_document(cluster, links))
    else:
        _show(here.devices[0].kind, here, links)
    if probed.busy > _BUSY:
        say(
            f"this machine was busy: measurements usually took {probed.busy:.1f} times as long as undisturbed; probe again when it is quiet"
        )
    if output is not None:
        say(f"wrote {output}")
    if serve is not None:
        _serve(serve, dump_cluster(here))


def _serve(port: int, description: str) -> None:
    """Answer the probes of other hosts, one after another, until Ctrl-C."""
    from atoll.cluster.peer import listen, serve_session

    with listen(port) as server:
        say(f"answering probes on port {server.getsockname()[1]}; Ctrl-C ends")
        try:
            while True:
                say(serve_session(server, description))
        except KeyboardInterrupt:
            say("ended")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr while something is measured."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        say(f"{what} …")
        yield _quarters(what)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)


def _quarters(what: str) -> Callable[[float], None]:
    """A plain line at every quarter of the way, where no bar can be drawn."""
    told = 0

    def tick(share: float) -> None:
        nonlocal told
        if share < 1 and int(share * 4) > told:
            told = int(share * 4)
            say(f"{what}: {told / 4:.0%}")

    return tick


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ClusterError(f"-o {path}: cannot be written: {error.strerror}") from None


def _document(cluster: Cluster, links: "list[PeerLink]") -> dict[str, object]:
    keys = {
        "address": "address",
        "round_trip_seconds": "round_trip_s",
        "there_bytes_per_second": "there_bytes_per_s",
        "back_bytes_per_second": "back_bytes_per_s",
    }
    return {"cluster": cluster, "peers": [{key: getattr(link, name) for key, name in keys.items()} for link in links]}


def _show(kind: DeviceKind, here: Cluster, links: "list[PeerLink]") -> None:
    assert kind.measured is not None, "the probe measures what it describes"
    heading = Text.assemble((kind.name, "bold"), f" · {len(here.devices)} in host {here.hosts[0].name}")
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_row(
        "memory", f"{units.format_bytes(kind.memory_bytes)}, of which planning may use {units.format_bytes(here.devices[0].memory_bytes)}"
    )
    facts.add_row("memory bandwidth", f"{units.format_bytes(kind.memory_bytes_per_s)}/s")
    facts.add_row("one operator", units.format_seconds(kind.measured.operator_seconds))
    for rate in kind.measured.memory:
        facts.add_row(f"elementwise, {units.format_bytes(rate.bytes)}", f"{units.format_bytes(rate.bytes_per_s)}/s")
    for conv in kind.measured.conv:
        shape = f"convolution {conv.kernel}×{conv.kernel}, {conv.inputs} → {conv.outputs}, {conv.size}² × {conv.batch}"
        facts.add_row(shape, units.format_flops(conv.flops_per_s))
    for link in links:
        there, back = units.format_rate(link.there_bytes_per_s), units.format_rate(link.back_bytes_per_s)
        facts.add_row(f"link to {link.address}", f"{there} there, {back} back, round trip {units.format_seconds(link.round_trip_s)}")
    show(heading, facts, _products(kind.measured.matmul))


def _products(rates: tuple[MatmulRate, ...]) -> Table:
    """Products by shape and precision."""
    table = Table(box=box.SIMPLE_HEAD, title="matrix products", title_justify="left")
    precisions = list(dict.fromkeys(rate.precision for rate in rates))
    for header in ("rows", "columns", "depth", *precisions):
        table.add_column(header, justify="right")
    by_shape: dict[tuple[int, int, int], dict[str, float]] = {}
    for rate in rates:
        by_shape.setdefault((rate.rows, rate.columns, rate.depth), {})[rate.precision] = rate.flops_per_s
    for shape, found in by_shape.items():
        table.add_row(*map(str, shape), *(units.format_flops(found[p]) if p in found else "too slow" for p in precisions))
    return table
