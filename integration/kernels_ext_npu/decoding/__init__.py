"""Decode in graphs: one launch for a whole forward of one token, where a launch for each operator keeps the host busy."""
