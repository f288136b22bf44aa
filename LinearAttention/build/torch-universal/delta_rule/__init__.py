"""Gated delta rules: in chunks for whole sequences, and token by token for steps of decoding."""
