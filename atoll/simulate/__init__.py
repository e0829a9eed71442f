"""The simulator: the swarm protocol's own code on a virtual clock, with faults drawn from a seed and a checker that sees everything."""
