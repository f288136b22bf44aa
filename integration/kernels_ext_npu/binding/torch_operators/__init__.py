"""Operators of torch itself that kernels compute, wherever they are called, while kernels are registered."""
