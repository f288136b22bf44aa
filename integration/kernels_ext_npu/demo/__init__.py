"""The main job, shown on tiny models."""
