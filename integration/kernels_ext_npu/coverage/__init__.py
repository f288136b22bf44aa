"""What of the installed transformers has a kernel."""
