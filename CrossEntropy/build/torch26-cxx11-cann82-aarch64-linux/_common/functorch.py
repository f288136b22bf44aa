"""Whether torch transforms functions: then the operators here step aside for the same formula in torch.

torch.func and forward-mode derivatives have rules for every operator of torch. Those of torch_npu have none: their
tangents would be lost without a word, and torch.func takes no node of autograd that is written in Python as ours are.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Tell whether a transform of torch.func runs, or derivatives are computed forward."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
