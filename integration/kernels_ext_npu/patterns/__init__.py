"""The forwards of transformers that our kernels replace, by the names that they have in matching/known_forwards.json.

The tuple PATTERNS of each file says which layer of which kernel repository takes the place of a forward, and on which
instances.
"""
