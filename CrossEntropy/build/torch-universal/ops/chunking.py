"""Into how many chunks logits, tokens x words, are cut: two at least, so that none in float32 has all, and few.

A head that is trained keeps the gradient of all its logits for the backward, if it fits into `LOGITS_BUDGET` bytes. If
not it keeps as many logits, and those of the chunks behind are computed again there.
"""

from __future__ import annotations

from collections.abc import Iterator

_CHUNK_LOGITS = 2**27  # of a chunk of the vocabulary, 512 MiB in float32
_MIN_CHUNKS, _MAX_CHUNKS = 2, 8
LOGITS_BUDGET = 9 * 2**28  # bytes: all logits of 4,096 tokens and 294,912 words in 16 bits
_WORD_ALIGNMENT = 128  # words: rows of 256 bytes in float16 and bfloat16


def vocab_chunk_count(tokens: int, words: int) -> int:
    """Return into how many chunks the vocabulary is cut."""
    return min(max(-(-tokens * words // _CHUNK_LOGITS), _MIN_CHUNKS), _MAX_CHUNKS)


def token_chunk_count(tokens: int, words: int) -> int:
    """Return into how many chunks tokens are cut. Each has all words, and reads their weight twice."""
    return max(-(-tokens * words // (4 * _CHUNK_LOGITS)), _MIN_CHUNKS)


def float32_chunk_count(tokens: int, words: int) -> int:
    """Return into how many chunks rows are cut where logits are cast to float32: 256 MiB each, or half of them."""
    return max(-(-2 * tokens * words // _CHUNK_LOGITS), _MIN_CHUNKS)


def row_slices(rows: int, chunks: int) -> Iterator[slice]:
    """Cut rows into chunks, one where there are none."""
    size = max(-(-rows // chunks), 1)
    for start in range(0, max(rows, 1), size):
        yield slice(start, min(start + size, rows))


def vocab_slices(words: int, chunks: int) -> Iterator[slice]:
    """Cut the vocabulary into chunks of one width; the last one has the rest."""
    width = max(-(-words // chunks), 1)
    if width >= _WORD_ALIGNMENT:
        width = -(-width // _WORD_ALIGNMENT) * _WORD_ALIGNMENT
    for start in range(0, words, width):
        yield slice(start, min(start + width, words))
