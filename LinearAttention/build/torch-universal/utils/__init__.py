"""What several of the recurrences and convolutions need."""
