"""Routers, recognised by running them."""
