"""Formulas of losses and of their gradients, and the steps in which tokens and vocabulary are gone through."""
