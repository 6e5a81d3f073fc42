"""The command line: `metanudge COMMAND …`, or `python -m metanudge COMMAND …`.

A command is a module with `run(argv: list[str]) -> int`; it is listed in `metanudge.cli.commands`
and imported when it is called, so that `--help` is instant.
"""

from metanudge.cli.program import main

__all__ = ["main"]
