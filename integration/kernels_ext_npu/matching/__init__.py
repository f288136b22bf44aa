"""Match classes and functions of transformers with patterns, and classify those that match none."""
