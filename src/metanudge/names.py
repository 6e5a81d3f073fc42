"""Names in messages: shown safely, a few of many, and what a misspelled one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def shown(name: object) -> str:
    """A name without what a terminal would obey or cannot show: control characters and bytes that
    are no text.

    Example:
        >>> shown("caf\\u00e9 \\x1b[2J\\udcff")
        'café \\\\x1b[2J\\\\udcff'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(name)
    )


def some(names: Sequence[object], most: int = 10) -> str:
    """The first few names, and how many more there are.

    Example:
        >>> some("abcde", 3)
        'a, b, c and 2 more'
    """
    more = len(names) - most
    return ", ".join(shown(name) for name in names[:most]) + (
        f" and {more} more" if more > 0 else ""
    )


def near(name: object, names: Iterable[str]) -> str:
    """ " Did you mean …?" for an error message, or nothing when no name is close.

    Example:
        >>> near("validation", ["train", "val", "test"])
        " Did you mean 'val'?"
    """
    found = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.4)
    return f" Did you mean {found[0]!r}?" if found else ""
