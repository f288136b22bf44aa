"""Rotary functions, methods and modules that rotate, recognised by running them."""
