"""What was swapped in a model, and what was not, and why."""
