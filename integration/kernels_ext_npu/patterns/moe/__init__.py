"""Routers, experts, and blocks of both."""
