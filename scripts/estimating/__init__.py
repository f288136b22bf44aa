"""Fits the constants of the estimate of time to what others measured, and says how far it is from the rest."""
