"""Survey which classes and functions of the installed transformers have a kernel."""
