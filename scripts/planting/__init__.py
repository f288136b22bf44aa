"""Plant faults of one per cent in the kernels, and find the tests that see them."""
