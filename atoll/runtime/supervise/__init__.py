"""Supervision: the processes of a run, started, watched and ended, whatever the mode."""
