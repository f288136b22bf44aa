"""How many additions and multiplications the products inside of an operator are: of matrices, convolutions, attention.

An operator that has no formula here is bound by memory, unless its name says that it multiplies: then its flops are
unknown, and whoever prints an estimate has to say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch._ops import OpOverload

# what names of operators that multiply have in them, and names that have it and are of operators that do not
_MULTIPLIES = re.compile(
    r"mm(?![a-z])|mmv|matmul|attention|attn|linear|conv(?!ert)|^(add)?mv$|dot$|_dot_|linalg_|triangular_solve|cholesky"
    r"|lstm|gru|rnn_|ffn|mla_prolog|indexer|delta_rule|lightning|floyd|cdist|einsum|(?<!re)solve"
)
_DOES_NOT = re.compile(
    r"upsample|log_linear|_get_max_workspace$|_infer_output$|attention_(update|to_ffn|worker)|ffn_(to|worker)"
    r"|worker_scheduler|advance_step|linalg_(vector_)?norm|linalg_cross|linalg_diagonal|softmax_lse|attn_softmax"
)


def operator_name(operator: OpOverload) -> str:
    """Return the name of an operator without its namespace and overload."""
    return operator._schema.name.partition("::")[2]


def flops(operator: OpOverload, args: tuple, kwargs: dict, result: Any) -> float:
    """Count the additions and multiplications of the products in a call; 0 where it has none, or they are unknown."""
    formula = _FORMULAS.get(operator_name(operator).rstrip("_"))
    return 0 if formula is None else formula(arguments(operator, args, kwargs), result)


def arguments(operator: OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments of a call by their names in the schema, with the defaults of those that are not given."""
    known = operator._schema.arguments
    given = {argument.name: argument.default_value for argument in known}
    return given | dict(zip((argument.name for argument in known), args)) | kwargs


def multiplies(name: str) -> bool:
    """Tell whether the flops of an operator of this name are known."""
    return name.rstrip("_") in _FORMULAS


def is_unknown(name: str) -> bool:
    """Tell whether an operator multiplies, to judge by its name, and no formula here says how much."""
    return not multiplies(name) and bool(_MULTIPLIES.search(name)) and not _DOES_NOT.search(name)


def _matmul(given: dict[str, Any], result: Any) -> float:
    left = next(given[name] for name in ("mat1", "batch1", "self", "input") if name in given)
    return 2 * result.numel() * left.shape[-1]


def _matmul_backward(given: dict[str, Any], result: Any) -> float:
    wanted = sum(gradient is not None for gradient in result)
    return 2 * given["grad"].numel() * given["self"].shape[-1] * wanted


def _linear_backward(given: dict[str, Any], result: Any) -> float:
    """Count two products, for the gradients of the input and of the weight."""
    return 2 * 2 * given["grad"].numel() * given["input"].shape[-1]


def _vector(given: dict[str, Any], result: Any) -> float:
    """Count the product of a matrix or vector with a vector, which reads each element of the first one once."""
    return 2 * (given["mat"] if "mat" in given else given["self"]).numel()


def _solve_triangular(given: dict[str, Any], result: Any) -> float:
    """Count a substitution, which is half of the product of its matrices."""
    solved = result[0] if isinstance(result, tuple | list) else result
    return solved.numel() * (given["A"] if "A" in given else given["self"]).shape[-1]


def _grouped_mm(given: dict[str, Any], result: Any) -> float:
    """Count products of groups of rows, each with a matrix of its own, or of groups of what is added up."""
    left, right = given["self"], given["mat2"]
    if left.dim() == right.dim() == 3:
        return 2 * left.numel() * right.shape[-1]
    return 2 * left.numel() * right.shape[-1] if left.dim() == 2 else 2 * right.numel() * left.shape[1]


def _npu_grouped_matmul(given: dict[str, Any], result: Any) -> float:
    """Count products of groups: each row of the one side goes through one matrix, however the groups are cut."""
    x, weight = given["x"], given["weight"]
    if len(x) == len(weight):
        return sum(2 * rows.numel() * matrix.shape[-1] for rows, matrix in zip(x, weight))
    return sum(2 * rows.numel() for rows in x) * weight[0].shape[-1]


def _convolution(given: dict[str, Any], result: Any) -> float:
    """Count what each element of the longer side takes from one filter."""
    side = given["input"] if given["transposed"] else result
    return 2 * side.numel() * given["weight"][0].numel()


def _convolution_backward(given: dict[str, Any], result: Any) -> float:
    """Count the products of a convolution once for the input and once for its filters, where they are wanted."""
    side = given["input"] if given["transposed"] else given["grad_output"]
    return 2 * side.numel() * given["weight"][0].numel() * sum(given["output_mask"][:2])


def _attention(given: dict[str, Any], result: Any) -> float:
    """Count two products, of queries and keys and of what they become with values."""
    pairs, width, value_width = _looked_at(given)
    return 2 * pairs * (width + value_width)


def _attention_backward(given: dict[str, Any], result: Any) -> float:
    """Count five products in place of two: scores are computed again."""
    pairs, width, value_width = _looked_at(given)
    return 2 * pairs * (3 * width + 2 * value_width)


def _looked_at(given: dict[str, Any]) -> tuple[float, int, int]:
    """Return how many pairs of a query and a key are multiplied, in all heads and rows, and the widths of a head.

    What ``sparse_mode`` leaves out is left out. Sequences behind each other count as one where their lengths are not
    known.
    """
    query, key, value, layout = (given[name] for name in ("query", "key", "value", "input_layout"))
    layout = layout.partition("_")[0]  # BNSD_BSND says how the result lies
    heads = next(given[name] for name in ("head_num", "num_query_heads", "num_heads") if name in given)
    sequence = layout.index("T" if "T" in layout else "S")
    queries, keys = query.shape[sequence], key.shape[sequence]
    rotated = given.get("query_rope")
    width = query.shape[-1] if "D" in layout else query.shape[-1] // heads
    value_width = value.shape[-1] * width // key.shape[-1]  # key and value have equally many heads
    rows = query.numel() // (queries * heads * width)
    lengths = ("T" in layout and packed_lengths(given)) or [(queries, keys)]
    pairs = sum(visible(*each, given.get("sparse_mode") or 0, *_band(given)) for each in lengths)
    return rows * heads * pairs, width + (0 if rotated is None else rotated.shape[-1]), value_width


def packed_lengths(given: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the lengths of packed sequences, of queries and of keys; none where they are not known."""
    ends = [given.get(f"actual_seq_{side}") for side in ("qlen", "kvlen")]
    if not all(isinstance(each, list | tuple) and each for each in ends):
        return []
    return [(end - start, last - first) for (start, first), (end, last) in pairwise([(0, 0), *zip(*ends)])]


def _band(given: dict[str, Any]) -> tuple[int, int]:
    """Return how many keys before and behind its place a query sees, which releases spell differently."""
    before, behind = (given.get(f"{side}_tockens", given.get(f"{side}_tokens")) for side in ("pre", "next"))
    return (2**31 if before is None else before), (2**31 if behind is None else behind)


def visible(queries: int, keys: int, mode: int, before: int, behind: int) -> int:
    """Count the pairs of a query and a key that are multiplied with a ``sparse_mode`` of CANN's attention.

    Mode 2 is causal with the first query at the first key, 3 with the last one at the last, 4 a band along that
    diagonal. All others multiply everything: what a mask hides is computed first.
    """
    if mode not in (2, 3, 4):
        return queries * keys
    shift = 0 if mode == 2 else keys - queries
    last = behind if mode == 4 else 0
    first = before if mode == 4 else queries + keys
    return _below(queries, keys, shift + last) - _below(queries, keys, shift - first - 1)


def _below(queries: int, keys: int, diagonal: int) -> int:
    """Count the pairs (i, j) with j - i <= diagonal: each query i sees i + diagonal + 1 keys, if there are so many."""

    def up_to(number: int) -> int:
        ramp = max(0, min(number, keys))
        return ramp * (ramp + 1) // 2 + max(0, number - keys) * keys

    return up_to(queries + diagonal) - up_to(diagonal)


def _linear_cross_entropy(given: dict[str, Any], result: Any) -> float:
    return 2 * given["input"].numel() * given["weight"].shape[0]


def _linear_cross_entropy_backward(given: dict[str, Any], result: Any) -> float:
    """Count the gradients of the input and of the weight, and the logits anew where nobody kept them."""
    return (2 if given.get("softmax") is not None else 3) * _linear_cross_entropy(given, result)


# by the name without the _ of what writes in place
_FORMULAS: dict[str, Callable[[dict[str, Any], Any], float]] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "npu_linear"), _matmul),
    "matmul_backward": _matmul_backward,
    "npu_linear_backward": _linear_backward,
    **dict.fromkeys(("mv", "addmv", "dot", "vdot"), _vector),
    **dict.fromkeys(("linalg_solve_triangular", "triangular_solve"), _solve_triangular),
    "_grouped_mm": _grouped_mm,
    "npu_grouped_matmul": _npu_grouped_matmul,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **{f"npu_fusion_attention{version}": _attention for version in ("", "_v2", "_v3")},
    **{f"npu_fusion_attention_grad{version}": _attention_backward for version in ("", "_v2", "_v3")},
    **{f"npu_fused_infer_attention_score{version}": _attention for version in ("", "_v2")},
    **dict.fromkeys(("npu_prompt_flash_attention", "npu_incre_flash_attention"), _attention),
    "npu_fused_linear_online_max_sum": _linear_cross_entropy,
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward": _linear_cross_entropy_backward,
}
