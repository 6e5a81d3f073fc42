"""What a misspelled name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(name: object, names: Iterable[str]) -> str:
    """ " Did you mean …?" for an error message, or nothing when no name is close.

    Example:
        >>> near("validation", ["train", "val", "test"])
        " Did you mean 'val'?"
    """
    found = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.4)
    return f" Did you mean {found[0]!r}?" if found else ""
