"""The forwards that our kernels replace, written as transformers writes them.

Each class or function is the documentation of the mathematics, the pattern that those of transformers are compared with
(matching/), and the oracle in the tests. The tuple PATTERNS of its file says which layer of which kernel repository
takes its place, and on which instances.
"""
