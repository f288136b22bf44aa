"""Sequences that are split between devices: exchange of keys and states, and what needs a whole sequence is refused."""
