"""Decode in graphs: one launch for the forward of a token, where otherwise each operator is one of its own."""
