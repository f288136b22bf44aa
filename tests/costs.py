"""What a forward and backward costs, counted on fake tensors: launches, and bytes that go in and out.

Every operator of torch and of torch_npu that moves data is a launch; views and allocations are none.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Cost(TorchDispatchMode):
    """Counts while the context is open.

    Attributes:
        launches: calls by operator.
        bytes: of the tensors that an operator takes and gives, by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.partition("::")[2]
        moves = any(isinstance(value, torch.Tensor) for value in tree_leaves(result))
        if operator.namespace != "prim" and moves and not is_view(operator) and name not in ALLOCATIONS:
            self.launches[name] += 1
            tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, torch.Tensor)]
            self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def is_view(operator: torch._ops.OpOverload) -> bool:
    returns = operator._schema.returns
    aliased = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    return aliased or operator._schema.name in ("aten::_unsafe_view", "aten::_reshape_alias", "aten::detach")


def fake_model(model_type: str, **sizes: int) -> PreTrainedModel:
    """A bfloat16 model on the NPU that takes no memory; inside a FakeTensorMode."""
    with torch.device("npu"):
        config = AutoConfig.for_model(model_type, dtype="bfloat16", **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def costs(prepare, model_type: str, tokens: int, **sizes: int) -> tuple[Cost, Cost]:
    """Of a forward without gradients, and of a forward and backward, of a model that was prepared."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(model_type, **sizes)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="npu")
        prepare(model.eval())
        with torch.no_grad(), Cost() as forward:
            model(ids, use_cache=False)
        prepare(model.train())
        with Cost() as training:
            model(ids, use_cache=False).logits.sum().backward()
    return forward, training
