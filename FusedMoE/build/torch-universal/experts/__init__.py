"""Experts, stacked in one tensor or in a list of modules, each way as one node of autograd, and layers of them."""
