"""Spans of time for people."""

from __future__ import annotations


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss.

    Example:
        >>> clock(65), clock(3665)
        ('1:05', '1:01:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
