"""`python -m metanudge`, as torchrun needs it."""

import sys

from metanudge.cli import main

if __name__ == "__main__":
    sys.exit(main())
