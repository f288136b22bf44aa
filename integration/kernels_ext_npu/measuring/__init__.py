"""Counters of what a computation costs, which count while torch runs."""
