"""Sizes of small models, by the names that most configs of transformers have for them."""

from typing import Any


def sizes(
    hidden: int, inner: int, heads: int, keys: int, width: int, layers: int, words: int, **others: Any
) -> dict[str, Any]:
    """Return the options of a config.

    Args:
        hidden: the size of hidden states.
        inner: that between the projections of an MLP.
        heads: of queries.
        keys: heads of keys and values.
        width: the size of a head.
        layers: how many there are.
        words: of the vocabulary.
        others: go into the config as they are.
    """
    return others | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": words,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": width,
    }
