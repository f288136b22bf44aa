"""Linear layers: those with adapters of low rank."""
