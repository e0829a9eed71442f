"""What carries tensors and typed calls between hosts: docs/fabric.md."""

from atoll.fabric.backoff import Backoff
from atoll.fabric.connection import ConnectionSettings
from atoll.fabric.deadline import DeadlineRule, LinkEstimate
from atoll.fabric.fabric import Fabric
from atoll.fabric.liveness import LivenessRule, PeerState
from atoll.fabric.memory_carrier import MemoryCarrier
from atoll.fabric.method import Peer
from atoll.fabric.remote import Remote
from atoll.fabric.shaped import ShapedLink
from atoll.fabric.tcp import TcpCarrier

__all__ = [
    "Backoff",
    "ConnectionSettings",
    "DeadlineRule",
    "Fabric",
    "LinkEstimate",
    "LivenessRule",
    "MemoryCarrier",
    "Peer",
    "PeerState",
    "Remote",
    "ShapedLink",
    "TcpCarrier",
]
