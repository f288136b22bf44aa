"""DeepSeek sparse attention: an indexer that chooses keys for each query, and attention to those."""
