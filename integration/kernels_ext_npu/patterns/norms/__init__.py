"""RMS norms, gated RMS norms and layer norms."""
