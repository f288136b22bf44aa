"""What a user calls: one file an act, and the one sequence by which kernels get into a model."""
