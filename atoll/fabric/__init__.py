"""What carries tensors and typed calls between hosts: docs/fabric.md.

Everything is loaded when it is first asked for: addresses and tokens are looked at before PyTorch is loaded, which takes seconds.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.fabric.connection import ConnectionSettings
    from atoll.fabric.deadline import Backoff
    from atoll.fabric.fabric import Fabric
    from atoll.fabric.liveness import LivenessRule
    from atoll.fabric.remote import Remote
    from atoll.fabric.service import CallingPeer
    from atoll.fabric.shaped import ShapedLink
    from atoll.fabric.tcp import TcpCarrier

__all__ = [
    "Backoff",
    "ConnectionSettings",
    "Fabric",
    "LivenessRule",
    "CallingPeer",
    "Remote",
    "ShapedLink",
    "TcpCarrier",
]

_HOME = {
    "Backoff": "atoll.fabric.deadline",
    "ConnectionSettings": "atoll.fabric.connection",
    "Fabric": "atoll.fabric.fabric",
    "LivenessRule": "atoll.fabric.liveness",
    "CallingPeer": "atoll.fabric.service",
    "Remote": "atoll.fabric.remote",
    "ShapedLink": "atoll.fabric.shaped",
    "TcpCarrier": "atoll.fabric.tcp",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'atoll.fabric' has no attribute {name!r}")
