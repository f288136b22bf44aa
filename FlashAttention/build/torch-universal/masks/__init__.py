"""Masks: what a mask function of transformers, padding or a tensor says, in the form that an operator takes."""
