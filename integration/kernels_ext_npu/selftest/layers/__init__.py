"""Every layer of the repositories on modules and functions that it serves."""
