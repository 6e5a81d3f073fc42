"""`python -m metanudge`, as torchrun needs it."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # `python -m` looks for modules in the current folder first, which may be a stranger's run; the
    # installed command does not.
    if (
        sys.path[0]
        and not sys.flags.safe_path
        and Path(sys.path[0]) == Path.cwd() != Path(__file__).resolve().parents[1]
    ):
        del sys.path[0]

    from metanudge.cli import main

    code = main()
    if "RANK" in os.environ:
        # One of several processes. Everything is written, but threads of the communication library
        # may still run, and clearing them away at the interpreter's end aborts the process now and
        # then, which torchrun would take for a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
