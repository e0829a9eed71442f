"""Cluster: what there is to run on."""

from atoll.cluster.build import make_cluster, make_site
from atoll.cluster.cluster import (
    CONTENT_KINDS,
    AttentionRate,
    Cluster,
    ConvRate,
    Device,
    DeviceKind,
    Host,
    Link,
    MatmulRate,
    Measurements,
    MemoryRate,
    OperatorRate,
    Site,
    UpdateTime,
)
from atoll.cluster.file import dump_cluster, load_cluster, parse_cluster
from atoll.cluster.kinds import catalogue, device_kind

__all__ = ["CONTENT_KINDS", "Cluster", "Device", "DeviceKind", "Host", "Link", "Measurements", "Site"]
__all__ += ["AttentionRate", "ConvRate", "MatmulRate", "MemoryRate", "OperatorRate", "UpdateTime"]
__all__ += ["catalogue", "device_kind", "dump_cluster", "load_cluster", "make_cluster", "make_site", "parse_cluster"]
