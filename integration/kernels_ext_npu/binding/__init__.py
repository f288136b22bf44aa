"""Bind forwards to modules, patch attributes and entries of tables, and undo both."""
