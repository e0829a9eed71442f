"""Alone: the job in one process on one device, the reference for every other mode."""
