"""Functions that rotate queries and keys, and the tables of cos and sin that they rotate by."""
