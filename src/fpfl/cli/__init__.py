"""The command line: thin commands around what Python has."""

from fpfl.cli.app import app, main

__all__ = ["app", "main"]
