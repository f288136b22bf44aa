"""Linear layers: those with adapters of low rank, and those in few bits."""
