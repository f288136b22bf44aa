"""Routers: logits, the experts that they choose and how much each counts, and layers that compute both."""
