"""What ``kernels-ext-npu benchmark`` runs: calls of real models, by their original, by our kernels and by others'."""
