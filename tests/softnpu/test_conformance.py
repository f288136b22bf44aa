"""Every formula against the wheel: the parameters of its schema, the shapes and dtypes of its own meta kernel.

The list of formulas is the registry of softnpu, and conforming.py asks what tests call of them. A formula fails that no
test of formulas names, and that has no samples here.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch_npu

from softnpu.aten_missing_on_cpu import FORMULAS as ATEN
from softnpu.formulas import COMPOSED, FORMAT_CASTS, NATIVE
from softnpu.formulas import FORMULAS as NPU
from softnpu.out_of_reach import REFUSED
from tests.softnpu.conforming import ALL, assert_conforms, moved

HALF = torch.bfloat16
# lengths of the CPU and an input of the device, and from the one to the other: test_host_execution.py
TWO_DEVICES = {"_pack_padded_sequence", "_copy_from_and_resize"}


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(0.1, 1, torch.Size(shape).numel()).view(shape).to(dtype)


def halves(*shapes: tuple[int, ...]) -> tuple:
    return tuple(rows(*shape, dtype=HALF) for shape in shapes)


IDS = torch.tensor([0, 2, 2, 1])
SLOTS = torch.tensor([0, 2, 3, 1], dtype=torch.int32)
MAP = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
MAPPED = torch.tensor([0, 2, 3, 4, 1, 5], dtype=torch.int32)
X, PAIR = rows(2, 3), (rows(2, 3), halves((2, 3))[0])
INFERENCE = halves((2, 3, 256), (2, 5, 256), (2, 5, 256)), {"input_layout": "BSH", "num_query_heads": 4}
HEADS, KEYS, STATISTICS = rows(2, 4, 3, 8), rows(2, 2, 5, 8), rows(2, 4, 3, 8)
SAVED = {"softmax_max": STATISTICS, "softmax_sum": STATISTICS, "attention_in": HEADS}
BACKWARD = (HEADS, KEYS, KEYS, HEADS, 4, "BNSD")
# calls of operators that no test of formulas calls
SAMPLES: dict[str, list[tuple[tuple, dict]]] = {
    "npu_fused_infer_attention_score_v2.out": [
        (INFERENCE[0], INFERENCE[1] | {"out": [torch.empty(2, 3, 256, dtype=HALF), torch.empty(0)]})
    ],
    "_npu_fused_infer_attention_score_v2_get_max_workspace": [INFERENCE],
    "_npu_fused_infer_attention_score_v2_infer_output": [
        (halves((5, 4, 64), (6, 4, 64)), {"num_query_heads": 4, "input_layout": "TND", "return_softmax_lse": True}),
    ],
    "npu_fusion_attention_grad_v3.out": [(BACKWARD, SAVED | {"out": [rows(2, 4, 3, 8), *[rows(2, 2, 5, 8)] * 2]})],
    "_npu_fusion_attention_grad_v3_get_max_workspace": [(BACKWARD, SAVED)],
    "_npu_fusion_attention_grad_v3_infer_output": [(BACKWARD[:3], {})],
    "npu_fused_linear_online_max_sum": [  # has no meta kernel
        ((*halves((9, 8), (20, 8)), torch.arange(15, 24), 16, 20, is_returned), {}) for is_returned in (True, False)
    ],
    "npu_moe_token_unpermute": [((rows(4, 8), SLOTS, rows(2, 2)), {}), ((*halves((4, 8)), SLOTS), {})],
    "npu_moe_token_unpermute_with_routing_map": [((rows(6, 8), MAPPED, [3, 8]), {"routing_map": MAP})],
    "npu_dtype_cast": [((rows(3), 15), {}), ((rows(3, dtype=HALF), 6), {"input_dtype": 15})],
    **{f"{name}npu_dtype_cast_backward": [((rows(3, dtype=HALF), torch.float32), {})] for name in ("", "_")},
    "l1_loss_backward": [((X, X, X, 0), {}), ((rows(1)[0], X, X, 1), {})],
    **{f"{name}_backward": [((X, X, X, 0), {"log_target": True})] for name in ("kl_div", "kl_div_target")},
    "npu_binary_cross_entropy_with_logits_backward": [((X, X, X, None, rows(3), 0), {})],
    "repeat_interleave_backward_int": [((rows(4, 3), X, 2, 0), {}), ((rows(12), X, 2), {})],
    "repeat_interleave_backward_tensor": [((rows(4, 3), X, torch.tensor([1, 3]), 0), {})],
    "npu_renorm_backward": [((rows(3, 4), rows(3, 4), 2.0, 0, 0.5), {})],
    "matmul_double_backward": [((X, rows(3, 4), rows(2, 4), X, rows(3, 4), [True] * 3), {})],
    "matmul_backward": [((rows(2, 4), X, rows(3, 4), [True, True]), {}), ((rows(2), X, rows(3), [True] * 2), {})],
    "batch_norm_elemt.out": [((rows(2, 3, 4), None, None, rows(3), rows(3), 1e-5), {"out": torch.empty(2, 3, 4)})],
    "histc": [((IDS,), {"bins": 4, "max": 3})],
    "histc.out": [((IDS, 4, 0, 3), {"out": torch.empty(4, dtype=torch.int64)})],
    "mm.dtype": [((*halves((2, 3), (3, 4)), torch.float32), {})],
    "bmm.dtype": [((*halves((2, 2, 3), (2, 3, 4)), torch.float32), {})],
    "addmm.dtype": [((rows(4), *halves((2, 3), (3, 4)), torch.float32), {"beta": 2})],
    "baddbmm.dtype": [((rows(2, 2, 4), *halves((2, 2, 3), (2, 3, 4)), torch.float32), {})],
    "_thnn_fused_lstm_cell": [((rows(2, 12), rows(2, 12), X, rows(12), rows(12)), {})],
    "_thnn_fused_lstm_cell_backward_impl": [((X, X, X, X, rows(2, 12), True), {})],
    "put_": [((X, torch.tensor([0, 4]), rows(2)), {}), ((X, torch.tensor([4]), rows(1), True), {})],
}
for name in ("_softmax", "_log_softmax"):
    out = "grad_input" if name == "_softmax" else "out"
    SAMPLES |= {
        name: [((x, 1, False), {}) for x in PAIR],
        f"{name}.out": [((X, 1, False), {"out": torch.empty(2, 3)})],
        f"{name}_backward_data": [((X, X, 1, torch.float32), {})],
        f"{name}_backward_data.out": [((X, X, 1, torch.float32), {out: torch.empty(2, 3)})],
    }


def overload(name: str) -> torch._ops.OpOverload:
    namespace, _, operator = ALL[name].partition("::")
    base, _, which = operator.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), which or "default")


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_those_of_the_schema(name: str) -> None:
    parameters = inspect.signature(NPU.get(name) or ATEN[name]).parameters
    arguments = list(overload(name)._schema.arguments)
    found = [(p.name, p.kind is p.KEYWORD_ONLY, p.default is not p.empty) for p in parameters.values()]
    expected = [(a.name, a.kwarg_only, a.has_default_value()) for a in arguments]
    if name in ATEN:  # one function may serve several overloads
        assert {n for n, *_ in expected} <= {n for n, *_ in found}
    else:
        assert found == expected
        for argument in arguments:
            if argument.has_default_value() and not isinstance(argument.default_value, (list, type(None))):
                assert parameters[argument.name].default == argument.default_value


@pytest.mark.parametrize("name", SAMPLES)
def test_shapes_dtypes_and_strides_are_those_of_the_wheel(name: str) -> None:
    for args, kwargs in SAMPLES[name]:
        assert_conforms(overload(name), moved(args, "npu"), moved(kwargs, "npu"))


def test_every_formula_has_samples_or_a_test() -> None:
    """Which names it, or what it is the gradient of."""
    assert SAMPLES.keys() <= ALL.keys()
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("*formula*.py"))
    named = {word.strip("_") for word in re.findall(r"\w+", tests)}
    others = {name.partition(".")[0].strip("_") for name in ALL.keys() - SAMPLES.keys() - TWO_DEVICES}
    assert {name for name in others if not {name, re.split("_backward|_grad", name)[0]} & named} == set()


def test_every_operator_without_a_formula_is_refused_with_one_reason() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    names = {name.partition("::")[2] for name in registered if name.startswith("npu::")}
    composed = {name for name, inner in COMPOSED.items() if hasattr(torch.ops.npu, inner)}
    listed = [name for group in REFUSED.values() for name in group.split()]
    assert len(listed) == len(set(listed))
    assert set(listed) == names - NPU.keys() - NATIVE - set(FORMAT_CASTS) - composed
    assert names >= NATIVE
    for name in listed:
        kernel = torch._C._dispatch_dump_table(f"npu::{name}").split("PrivateUse1: ")[1].split("\n")[0]
        assert "softnpu" in kernel, name


def test_a_refusal_says_why() -> None:
    with pytest.raises(NotImplementedError, match=r"npu::npu_prefetch: .*reads or changes the state of a card"):
        torch_npu.npu_prefetch(rows(2).to("npu"), None, 8)
