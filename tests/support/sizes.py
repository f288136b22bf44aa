"""Sizes of small models, by the names that most configs of transformers have for them."""

from typing import Any


def sizes(
    hidden: int, inner: int, heads: int, keys: int, width: int, layers: int, words: int, **others: Any
) -> dict[str, Any]:
    """Return the options of a config: ``inner`` is the size inside an MLP, ``width`` and ``keys`` are of heads."""
    return others | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": words,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": width,
    }
