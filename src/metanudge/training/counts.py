"""`--ways` and `--shots`: a number, or a range of them such as 3-10. Needs no torch."""

from __future__ import annotations

import re
import reprlib

from metanudge.training.errors import UserError


def count(flag: str, value: int | str | None) -> int | tuple[int, int] | None:
    """A number as it is, a range as (least, most).

    Example:
        >>> count("--ways", 5), count("--ways", "3-10")
        (5, (3, 10))
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", value.strip())
    if found is None:
        text = reprlib.repr(value)
        raise UserError(f"{flag} {text} is neither a number nor a range such as 3-10.")
    least, most = (int(found[1]), int(found[2] or found[1]))
    if least > most:
        raise UserError(
            f"{flag} {value} runs backwards. Write the smaller number first: {most}-{least}."
        )
    return least if least == most else (least, most)


def check_count(flag: str, value: int | str | None, least: int) -> None:
    """Refuse a number, or one end of a range, that makes no sense."""
    found = count(flag, value)
    for number in found if isinstance(found, tuple) else (found,):
        if number is not None and number < least:
            raise UserError(f"{flag} {value} is too small. Use {least} or more.")
        if number is not None and number >= 1 << 63:
            raise UserError(f"{flag} {value} is too large. Use a number below 2**63.")


def check_ways(ways: int | str | None, head: str) -> None:
    """Refuse a range of ways for a head that has one number of outputs."""
    if head == "fixed" and isinstance(count("--ways", ways), tuple):
        raise UserError(
            f"--ways {ways}: the last layer of a model has one number of outputs. For tasks of"
            " different numbers of classes it is made from the support set: add --head prototypes."
        )


def spelled(least: int, most: int) -> int | str:
    """As a configuration writes it.

    Example:
        >>> spelled(5, 5), spelled(3, 10)
        (5, '3-10')
    """
    return least if least == most else f"{least}-{most}"
