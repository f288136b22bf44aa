"""Publish a kernel repository: preflight, plan, apply, and what is checked afterwards."""
