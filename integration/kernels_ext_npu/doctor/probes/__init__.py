"""The functions that find something out about a machine, each in a process of its own.

They name each step before they take it, and say what they find as soon as they know it: whatever happens then.
"""
