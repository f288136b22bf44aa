"""Share what tests of several folders need: models, classes and functions to test on, truths, and counts."""
