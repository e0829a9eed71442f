"""Cluster: what there is to run on."""

from atoll.cluster.cluster import Cluster, Device, DeviceKind, Host, Link, Site

__all__ = ["Cluster", "Device", "DeviceKind", "Host", "Link", "Site"]
