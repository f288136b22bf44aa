"""Every public way to save and load a model: what each does, and which public names it goes through."""
