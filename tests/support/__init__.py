"""What tests of several folders share: models, classes and functions to test on, truths, and counts."""
