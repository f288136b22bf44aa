"""The demo: kernels swapped into tiny models, which are then compared with their originals."""
