"""What modules and functions of other people's code compute, found by running them."""
