"""Features of texts that need no model."""

from __future__ import annotations

import zlib

import numpy as np

from metanudge.tasks.ngrams import ngrams


def test_they_are_counts_of_words_and_runs_of_letters():
    parts = ["wab", " ab", "ab ", " ab ", "w!", " ! "]
    counts = np.zeros(1024)
    for part in [*parts, *parts[:4]]:
        counts[zlib.crc32(part.encode()) % 1024] += 1
    [found] = ngrams(["ab ! AB"])
    # 10 counts in 1024 bins; float32 rounds the quotient and its root
    np.testing.assert_allclose(found, np.sqrt(1024 * counts / 10), rtol=3e-7)


def test_any_text_has_some():
    texts = ["a", "?", "…", "日本語のテキスト", "👋🏽", "\u0301"]
    found = ngrams(texts)
    np.testing.assert_allclose(np.square(found).mean(1), 1.0, rtol=1e-5)
    assert len({one.tobytes() for one in found}) == len(texts)
    np.testing.assert_array_equal(ngrams(["\udc80"]), ngrams(["?"]))  # no character: cannot be read
