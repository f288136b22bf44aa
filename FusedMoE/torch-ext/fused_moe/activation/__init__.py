"""What an expert computes between its two products."""
