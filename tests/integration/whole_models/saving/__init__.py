"""Public ways to save and load a model, of which each does something else with what the model holds."""
