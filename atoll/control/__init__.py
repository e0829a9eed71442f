"""The swarm protocol: coordinator, feeder and worker as coroutines without I/O. docs/swarm.md is its text.

They see the world through `Clock`, `Transport`, `Journal`, `Checkpoints`, `Feed` and `Compute`, so that the same code runs over
sockets, in the lab and in the simulator.
"""

from atoll.control.checks import ALL_CHECKS, CHECKS, Checks
from atoll.control.coordinator import Coordinator
from atoll.control.feeder import Feeder
from atoll.control.settings import Settings
from atoll.control.worker import Worker
from atoll.control.world import Checkpoints, Clock, Compute, Feed, Journal, Mailbox, Node, Transport

__all__ = [
    "ALL_CHECKS",
    "CHECKS",
    "Checkpoints",
    "Checks",
    "Clock",
    "Compute",
    "Coordinator",
    "Feed",
    "Feeder",
    "Journal",
    "Mailbox",
    "Node",
    "Settings",
    "Transport",
    "Worker",
]
