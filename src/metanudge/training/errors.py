"""`UserError`: something the user can put right. Its message says what happened, why, and what to do."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The command line prints the message, without a traceback, and ends with exit code 2."""
