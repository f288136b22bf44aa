"""Delta rules, recurrences, scans, and the convolutions before them."""
