"""Sequences of several lengths, packed one behind the other in memory."""
