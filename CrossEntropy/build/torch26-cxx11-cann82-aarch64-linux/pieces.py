"""Into how many pieces tokens x words are cut: two at least, so that none in float32 has all of them, and few launches.

A head that is trained keeps the gradient of all its logits for the backward, if it fits into `KEPT` bytes. If not it
keeps as many logits, and those of the pieces behind are computed again there.
"""

from __future__ import annotations

from collections.abc import Iterator

_ELEMENTS = 2**27  # of a piece of the vocabulary, 512 MiB in float32
_AT_LEAST, _AT_MOST = 2, 8
KEPT = 9 * 2**28  # bytes: all logits of 4,096 tokens and 294,912 words in 16 bits
_ALIGNED = 128  # words: rows of 256 bytes in float16 and bfloat16


def how_many(tokens: int, words: int) -> int:
    """Return the number of pieces for tokens x words."""
    return min(max(-(-tokens * words // _ELEMENTS), _AT_LEAST), _AT_MOST)


def of_tokens(tokens: int, words: int) -> int:
    """Return the number of pieces for tokens x words where each has all words, whose weight it reads twice."""
    return max(-(-tokens * words // (4 * _ELEMENTS)), _AT_LEAST)


def for_statistics(tokens: int, words: int) -> int:
    """Return the number of pieces for what is computed of logits in float32: 256 MiB each, or half of the logits."""
    return max(-(-2 * tokens * words // _ELEMENTS), _AT_LEAST)


def of_rows(rows: int, pieces: int) -> Iterator[slice]:
    """Cut rows into pieces, one where there are none."""
    size = max(-(-rows // pieces), 1)
    for start in range(0, max(rows, 1), size):
        yield slice(start, min(start + size, rows))


def of_words(words: int, pieces: int) -> Iterator[slice]:
    """Cut the vocabulary into pieces of one width; the last one has the rest."""
    width = max(-(-words // pieces), 1)
    if width >= _ALIGNED:
        width = -(-width // _ALIGNED) * _ALIGNED
    for start in range(0, words, width):
        yield slice(start, min(start + width, words))
