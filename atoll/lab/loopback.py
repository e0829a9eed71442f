"""The world for those who may not make namespaces: hosts are addresses of the loopback interface, and what is imposed is imposed by the
fabric itself.

Every process finds in `ATOLL_LINKS` a file that says which of those addresses it has and what each way to another has as bandwidth and
latency; the fabric of a swarm's processes sends through links like that (`atoll/fabric/shaped.py`). Nothing else is shaped: not Gloo, not
other programs.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.cluster import Cluster
from atoll.cluster.cluster import wan_index
from atoll.errors import LabError
from atoll.lab.environment import LINKS
from atoll.lab.faults import Conditions
from atoll.lab.network import LabNetwork
from atoll.lab.world import LAB_FILES, all_processes, inside_command, mark

if TYPE_CHECKING:
    from atoll.fabric.shaped import ImposedLinks

__all__ = ["LoopbackWorld"]

_LOOK_SECONDS = 0.01


class LoopbackWorld:
    """Processes of this machine, each with an address of its host."""

    interface = "lo"

    def __init__(self, cluster: Cluster, name: str) -> None:
        if sys.platform != "linux":
            raise LabError("a lab needs Linux: elsewhere the loopback interface has one address only")
        self._cluster, self._name, self._network = cluster, name, LabNetwork(cluster)
        self.files = Path(tempfile.mkdtemp(prefix=f"{LAB_FILES}{mark(os.getpid())}-"))
        self.files_inside = str(self.files)
        self._alive, self._watched = os.pipe()[::-1]
        for host in cluster.hosts:
            (self.files / f"{host.name}.json").write_bytes(msgspec.json.encode(self._links(host.name)))

    @property
    def shaped(self) -> str:
        """What is imposed."""
        return (
            "no namespaces: hosts are addresses of the loopback interface; bandwidth and latency are imposed on what each process sends "
            "through the fabric, and on nothing else (not on Gloo, not on other programs; processes of a host do not share its bandwidth). "
            "Of the faults only kill, stop and continue work"
        )

    def address(self, host: str) -> str:
        """127.1.0.2 and so on."""
        return "127" + self._network.address(host).removeprefix("10")

    def extra(self, host: str) -> dict[str, str]:
        """Where the host's links are written."""
        return {LINKS: str(self.files / f"{host}.json")}

    def wrapped(self, host: str, command: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
        """With a guard that kills it when this process ends."""
        return inside_command("guard", str(self._watched), *command), (self._watched,)

    def namespaces(self, host: str) -> Sequence[str]:
        """There are none."""
        return ()

    def change(self, before: Conditions, after: Conditions) -> None:
        """There is no network of its own to change."""
        raise LabError("faults of the network need network namespaces; here only kill, stop and continue work")

    def processes(self, host: str) -> list[int]:
        """Those whose environment says that they are the host's."""
        wanted = {f"ATOLL_LAB={self._name}".encode(), f"ATOLL_LAB_HOST={host}".encode()}
        found = []
        for pid in all_processes():
            with contextlib.suppress(OSError):
                if pid != os.getpid() and wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    found.append(pid)
        return found

    def kill(self, host: str) -> None:
        """Until none is left."""
        while pids := self.processes(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)

    def boot(self, host: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Processes, then files."""
        for host in self._cluster.hosts:
            self.kill(host.name)
        for file in (self._alive, self._watched):
            with contextlib.suppress(OSError):
                os.close(file)
        shutil.rmtree(self.files, ignore_errors=True)

    def _links(self, own: str) -> "ImposedLinks":
        from atoll.fabric.shaped import ImposedLink, ImposedLinks  # loads PyTorch, which a lab of namespaces does without

        sites = {host.name: site for site in self._cluster.sites for host in site.hosts}
        wan = wan_index(self._cluster)
        peers = {}
        for other, site in sites.items():
            link = sites[own].link if site is sites[own] else wan[sites[own].name, site.name]
            if other != own:
                peers[self.address(other)] = ImposedLink(name=link.name, bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
        return ImposedLinks(source=self.address(own), peers=peers)
