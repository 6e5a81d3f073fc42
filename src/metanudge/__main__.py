"""`python -m metanudge`, as torchrun needs it."""

import os
import sys

from metanudge.cli import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # One of several processes. Everything is written, but threads of the communication library may still run, and clearing them away
        # at the interpreter's end aborts the process now and then, which torchrun would take for a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
