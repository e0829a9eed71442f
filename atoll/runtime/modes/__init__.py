"""Execution modes: one folder each, found through `atoll.runtime.mode`."""
