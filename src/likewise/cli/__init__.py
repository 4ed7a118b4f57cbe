"""The command `likewise`: arguments → settings → runs and reports."""

from likewise.cli.app import main

__all__ = ["main"]
