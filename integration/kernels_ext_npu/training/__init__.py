"""What training adds to a model with kernels: the loss of lightning indexers."""
