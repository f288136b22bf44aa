"""Match classes and functions with patterns by their fingerprints, and classify those that match none."""
