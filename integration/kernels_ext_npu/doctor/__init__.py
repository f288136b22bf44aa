"""Looks at a machine, and says what is wrong with it and what to do.

Probes that may crash or hang run in processes of their own, each with a time limit; what they find out is put into
findings here, in a process that imports neither torch nor what extends it.
"""
