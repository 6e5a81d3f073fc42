"""Words in messages: names shown safely, a few of many, what a misspelled one may have meant; text
that gives a terminal no orders; spans of time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

# All control characters but newline and tab, and those that reverse the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


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


def check_known(what: str, value: object, known: Sequence[str], more: str = "") -> None:
    """Raise a `ValueError` unless `value` is one of the known names; `more` is what else to do.

    Example:
        >>> check_known("split", "validation", ["train", "val"])
        Traceback (most recent call last):
            ...
        ValueError: Unknown split 'validation'. Did you mean 'val'? Choose one of: train, val.
    """
    if value not in known:
        raise ValueError(
            f"Unknown {what} {value!r}.{near(value, known)} Choose one of:"
            f" {', '.join(known)}{more}."
        )


def printable(text: str) -> str:
    r"""Text with control characters, which could move a terminal's cursor or rename its window,
    spelled out.

    Example:
        >>> printable("cat\x1b[2J")
        'cat\\x1b[2J'
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss.

    Example:
        >>> clock(65), clock(3665)
        ('1:05', '1:01:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
