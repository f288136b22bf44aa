"""The functions that users call, and the one sequence by which kernels get into a model."""
