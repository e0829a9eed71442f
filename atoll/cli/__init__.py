"""The command line: one file a command."""

from atoll.cli.main import main

__all__ = ["main"]
