"""The swarm protocol: coordinator, feeder and worker as coroutines without I/O. docs/swarm.md is its text.

They see the world through `Clock`, `Transport`, `Journal`, `Checkpoints`, `MicroBatchSource` and `Compute`, so that the same code runs over
sockets, in the lab and in the simulator.
"""

from atoll.control.coordinator import Coordinator
from atoll.control.feeder import Feeder
from atoll.control.settings import Settings
from atoll.control.worker import Worker
from atoll.control.world import Checkpoints, Clock, Compute, Journal, Mailbox, MicroBatchSource, SwarmProcess, Transport

__all__ = [
    "Checkpoints",
    "Clock",
    "Compute",
    "Coordinator",
    "Feeder",
    "Journal",
    "Mailbox",
    "MicroBatchSource",
    "Settings",
    "SwarmProcess",
    "Transport",
    "Worker",
]
