"""Layers whose forward `kernels` binds to the rotary functions of transformers, and to what makes their cos and sin.

Each takes the arguments of the function that it replaces, by the same names, and gives its dtypes.
"""

from .embedding import *
from .interleaved import *
from .rotate_half import *
