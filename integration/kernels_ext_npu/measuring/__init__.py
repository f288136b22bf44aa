"""What is counted while torch runs."""
