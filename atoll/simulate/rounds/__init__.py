"""Rounds of sites on a virtual clock: exact arithmetic, a checker that sees everything, and faults from a seed."""
