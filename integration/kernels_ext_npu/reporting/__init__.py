"""The report: what is swapped in a model, what is not, and why."""
