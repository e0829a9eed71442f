"""What a probe calls this machine."""

import re
import socket

__all__ = ["SITE", "this_host"]

SITE = "here"


def this_host() -> str:
    """The machine's name, as names of cluster files may be."""
    name = re.sub(r"[^\w.\-]+", "-", socket.gethostname().split(".")[0]).strip("-._")
    return name if name and name != SITE else "this-host"
