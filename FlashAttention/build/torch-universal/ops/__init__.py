"""Attention operators of torch_npu with their limits and gradients, and the same attention in torch."""
