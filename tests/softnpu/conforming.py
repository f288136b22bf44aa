"""Hold operators against the wheel: the shapes and dtypes of its own meta kernels, whatever strides arguments have.

What a test of formulas calls is asked so behind it, once for the dtypes and ranks of its tensors and its other
arguments. test_conformance.py has calls of the operators that no such test calls.
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import softnpu
from softnpu.aten_missing_on_cpu import FORMULAS as ATEN
from softnpu.formulas import FORMULAS as NPU

ALL = {**{name: f"npu::{name}" for name in NPU}, **{name: f"aten::{name}" for name in ATEN}}
NAMES = {operator: name for name, operator in ALL.items()}
# returns seed and offset of the dropout mask as CPU tensors outside of graph capture, as op-plugin documents
RETURNS_HOST_TENSORS = {"npu_fusion_attention_v3", "npu_fusion_attention_v3.out"}
# the smallest norm that a difference is compared with: where terms of size one cancel, float32 leaves 1e-6 of them
CANCELLED = 1e-4
# files of formulas in which torch's own dtypes hold
ANY_DTYPE = {"aten_gradients", "batch_norm", "cast", "layouts"}


def always(given: dict[str, Any]) -> bool:
    """Tell that an operator's meta kernel is wrong whatever it is given."""
    return True


# operators whose meta kernel raises, or gives other shapes or dtypes than op-plugin allocates, and for which arguments
WRONG_META: dict[str, Callable[[dict[str, Any]], bool]] = {
    "baddbmm.dtype": always,  # takes out_dtype for beta
    "npu_fusion_attention_grad_v2": always,  # makes tensors like the list [0]
    "npu_geglu_grad": always,  # has no defaults for dim and approximate, and returns two tensors for one
    "npu_cross_entropy_loss": always,  # zloss and what its gradient needs, where op-plugin makes them empty
    # gradients of parameters in their dtype, where they are float32
    "npu_deep_norm_backward": lambda given: given["gamma"].dtype != torch.float32,
    "npu_fusion_attention_grad_v3": lambda given: given["pse"] is not None,  # has no gradient of it
    "npu_fusion_attention_v2": lambda given: given["input_layout"] == "TND",  # statistics of each feature
    # has no result of int8, and wants ends of groups where there are none
    "npu_grouped_matmul": lambda given: given["output_dtype"] == 1 or given["split_item"] == 1,
    "npu_grouped_matmul.List": lambda given: (
        len(given["x"]) < len(given["weight"])
        if given["group_list"] and not given["split_item"]
        else not given["group_list"] and given["split_item"] < 2
    ),  # one tensor in place of one a group; and it wants ends, too
    "npu_moe_gating_top_k_softmax_v2": lambda given: (
        given["output_softmax"] and not given["renorm"] and given["x"].dim() == 3
    ),  # in two
    "npu_moe_init_routing_v2": lambda given: not len(given["x"]),  # refuses it
    "npu_top_k_top_p": lambda given: given["k"] is None,  # wants it
    "npu_bmmV2": lambda given: bool(given["output_sizes"]),  # leaves them out
    "_npu_moe_token_unpermute": lambda given: given["probs"] is None,  # what the gradient does not need then
}


class Calls(TorchDispatchMode):
    """Keeps what operators that have a formula are called with, one call of each kind."""

    known: set[tuple] = set()  # noqa: RUF012  of all tests of a process

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch._ops.OpOverload, tuple, dict[str, Any]]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator.name() not in NAMES or not any(tensor.is_npu for tensor in tensors((args, kwargs))):
            return operator(*args, **kwargs)
        leaves = [(v.dtype, v.dim()) if isinstance(v, torch.Tensor) else v for v in tree_leaves((args, kwargs))]
        kind = operator.name(), *leaves
        if kind in self.known:
            return operator(*args, **kwargs)
        call = operator, copied(args), copied(kwargs)  # some write to their arguments
        result = operator(*args, **kwargs)
        self.known.add(kind)
        self.found.append(call)
        return result


def assert_conforms(operator: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Call an operator with other strides and dtypes, and compare with its meta kernel."""
    name = NAMES[operator.name()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that see no key
        results = _results(operator, args, kwargs)
        assert all(t.device.type == "npu" for t in results) or name in RETURNS_HOST_TENSORS, name
        keys = ("Meta", "CompositeExplicitAutograd")
        if any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in keys):
            given = {a.name: a.default_value for a in operator._schema.arguments}
            given |= dict(zip(given, args)) | kwargs
            is_wrong = WRONG_META.get(name, lambda given: False)(given)
            assert (described(results) != _described_by_meta(operator, args, kwargs)) == is_wrong, (name, args, kwargs)
        _assert_strides_change_nothing(operator, args, kwargs, results)
        if name in NPU:
            _assert_float64_is_refused(operator, args, kwargs)


def _results(operator: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with softnpu.poisoned_memory():
        torch.npu.manual_seed(0)
        return tensors(operator(*copied(args), **copied(kwargs)))


def _described_by_meta(operator: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[tuple] | None:
    try:
        return described(operator(*moved(args, "meta"), **moved(kwargs, "meta")))
    except (RuntimeError, TypeError, IndexError):
        return None


def _assert_strides_change_nothing(
    operator: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], results: list[torch.Tensor]
) -> None:
    """Results are contiguous: op-plugin allocates them so. Meta kernels that report an argument's strides are wrong.

    Values are the same but for sums in another order, in norm: some cancel, and some are of numbers with 8 bits.
    """
    given = tree_map_only(torch.Tensor, turned, (args, kwargs))
    own = {id(t) for t in tensors(given)}
    with softnpu.poisoned_memory():
        torch.npu.manual_seed(0)
        try:
            found = tensors(operator(*given[0], **given[1]))
        except RuntimeError as refusal:
            if re.search("contiguous|transposed", str(refusal)):
                return
            raise
    for one, expected in zip(found, results, strict=True):
        assert one.is_contiguous() or id(one) in own
        if one.device.type == "npu" and one.dim():  # a scalar may be one that nobody writes
            assert torch.equal(one.isnan(), expected.isnan())
            one, expected = (t.nan_to_num().double().cpu() for t in (one, expected))
            assert (one - expected).norm() <= 2.0**-7 * max(expected.norm(), CANCELLED)


def _assert_float64_is_refused(operator: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """By the operator's name; where it takes all dtypes it takes this one, too."""
    name = NAMES[operator.name()]
    given = tree_map_only(torch.Tensor, widened, (args, kwargs))
    allocates = name.endswith(("_get_max_workspace", "_infer_output", "gen_mask.Tensor"))
    takes_any = allocates or NPU[name].__module__.rpartition(".")[2] in ANY_DTYPE
    if takes_any or not any(t.is_floating_point() for t in tensors(given)):
        operator(*given[0], **given[1])
        return
    with pytest.raises((RuntimeError, NotImplementedError), match=name.partition(".")[0].strip("_")):
        operator(*given[0], **given[1])


def copied(values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), values)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Make it float64 on the host: the device makes it float32."""
    return tensor.cpu().double().to(tensor.device) if tensor.is_floating_point() else tensor.clone()


def moved(values: Any, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.detach().to(device), values)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """Lay the same values out with the dimensions in the opposite order."""
    order = range(tensor.dim() - 1, -1, -1)
    return tensor.permute(*order).contiguous().permute(*order) if tensor.dim() > 1 else tensor.clone()


def tensors(values: Any) -> list[torch.Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


def described(values: Any) -> list[tuple]:
    return [(list(t.shape), t.dtype) for t in tensors(values)]
