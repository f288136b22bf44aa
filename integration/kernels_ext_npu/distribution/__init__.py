"""Kernel repositories on their way: bundled, cached, on the Hub, verified, chosen for a machine."""
