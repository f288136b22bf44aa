"""Recurrences of every element of a state by itself: state space models and linear recurrent units."""
