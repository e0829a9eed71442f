"""What a lab's processes find in their environment; `runtime/supervise/hosts.py` finds the lab in it. Pure: the environment is given.

Every process of a lab has `ATOLL_LAB` (its name), `ATOLL_LAB_HOST`, `ATOLL_LAB_HOSTS` (`oslo-0=10.1.0.2,…`), `ATOLL_LAB_SOCKET` (where
processes on other hosts are asked for), `ATOLL_CLUSTER` (the cluster file) and the interface for Gloo and NCCL. Where the lab imposes
speeds, `ATOLL_SPEEDS` names the file.
"""

from collections.abc import Mapping

from atoll.cluster import Cluster
from atoll.runtime.run_directory import SPEEDS
from atoll.runtime.supervise.hosts import LabView

__all__ = ["PER_HOST", "device_environments", "host_environment"]

MASTER_PORT = 29500  # torchrun's
LINKS = "ATOLL_LINKS"  # as `atoll.fabric.shaped` calls it; importing that would load PyTorch
PER_HOST = ("ATOLL_LAB_HOST", "HOSTNAME", "PET_NODE_RANK", "PET_NPROC_PER_NODE", LINKS)  # not to be taken along to another host


def host_environment(
    view: LabView, interface: str, cluster: Cluster, cluster_file: str, *, impose_speeds: bool = False, base: Mapping[str, str]
) -> dict[str, str]:
    """For a process on a host: what it is, and what torchrun needs to start ranks on every host."""
    hosts = [host.name for host in cluster.hosts]
    own = {
        "ATOLL_LAB": view.name,
        "ATOLL_LAB_HOST": view.host,
        "ATOLL_LAB_HOSTS": ",".join(f"{name}={address}" for name, address in view.addresses.items()),
        "ATOLL_LAB_SOCKET": view.socket,
        "ATOLL_CLUSTER": cluster_file,
        "HOSTNAME": view.host,
        "MASTER_ADDR": view.addresses[hosts[0]],
        "MASTER_PORT": str(MASTER_PORT),
        "PET_NNODES": str(len(hosts)),
        "PET_NODE_RANK": str(hosts.index(view.host)),
        "PET_NPROC_PER_NODE": str(len(cluster.hosts[hosts.index(view.host)].devices)),
        "PET_MASTER_ADDR": view.addresses[hosts[0]],
        "PET_MASTER_PORT": str(MASTER_PORT),
    }
    speeds = {SPEEDS: cluster_file} if impose_speeds else {}
    defaults = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**defaults, **base, **own, **speeds}


def device_environments(cluster: Cluster, host: str) -> list[dict[str, str]]:
    """On top of that, what torchrun would give each process of one a device: rank r is the cluster file's r-th device."""
    ranks = [rank for rank, device in enumerate(cluster.devices) if device.host == host]
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(cluster.devices)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        for local, rank in enumerate(ranks)
    ]
