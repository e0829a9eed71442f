"""Lab: several hosts and slow links on one machine, and what can go wrong there."""

from atoll.lab.faults import FaultKind, LabFault, load_faults, parse_fault, parse_faults
from atoll.lab.lab import Lab, LabProcess

__all__ = ["LabFault", "FaultKind", "Lab", "LabProcess", "load_faults", "parse_fault", "parse_faults"]
