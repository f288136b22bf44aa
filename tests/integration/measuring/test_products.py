"""The flops of estimates: each operator that multiplies has them, those of the products that its formula computes."""

import ast
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import kernels_ext_npu
import softnpu.formulas
from kernels_ext_npu.measuring import products
from kernels_ext_npu.measuring.products import flops, is_unknown, multiplies, visible
from softnpu.formulas import FORMULAS
from tests.support.sizes import sizes

SIZES = sizes(64, 128, heads=4, keys=2, width=16, layers=1, words=128)
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 4))}
DELTA |= {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
DELTA |= {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
DELTA |= {"shared_expert_intermediate_size": 32}
TYPES = {"qwen3": {}, "gemma3_text": {}, "qwen3_moe": EXPERTS, "gpt_oss": EXPERTS, "qwen3_next": EXPERTS | DELTA}
# operators that do not multiply matrices, or hardly do, though their formulas have a product in them
WITHOUT_PRODUCTS = {
    "npu_add_layer_norm_backward": "a sum over rows",
    "npu_deep_norm_backward": "a sum over rows",
    "npu_rotary_mul": "a rotation by a matrix of the caller's, which no model has",
}
UNPROFILED = ("convolution", "convolution_backward", "linalg_solve_triangular")  # the profiler knows no flops of these
MULTIPLYING = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


class Labelled(TorchDispatchMode):
    """Labels every call of an operator for the profiler, and counts its flops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.counted: list[float] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        with record_function(f"call {len(self.names)}"):
            result = operator(*args, **(kwargs or {}))
        self.names.append(operator._schema.name.partition("::")[2])
        self.counted.append(flops(operator, args, kwargs or {}, result))
        return result


def everything(queries: int, keys: int, *_: int) -> int:
    """Leave nothing out of attention, as the formulas of the software device do."""
    return queries * keys


def computed(profiled: profile) -> dict[int, float]:
    """Return the flops of the products inside of each labelled call.

    An event is inside of those of its thread that have begun and not ended. `profile.events` knows that, too, and takes
    longer than the models for it.
    """
    found: dict[int, float] = defaultdict(float)
    around: dict[int, list[tuple[str, int]]] = defaultdict(list)  # of each thread: names and ends, the outermost first
    events = profiled.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.end_ns())):
        above = around[event.start_thread_id()]
        while above and above[-1][1] <= event.start_ns():
            above.pop()
        names = [name for name, _ in above]
        calls = [place for place, name in enumerate(names) if name.startswith("call ")]
        if calls and event.name() in MULTIPLYING and not set(MULTIPLYING).intersection(names[calls[-1] :]):
            found[int(names[calls[-1]].split()[1])] += event.flops()
        above.append((event.name(), event.end_ns()))
    return found


@pytest.mark.software
@pytest.mark.parametrize(
    ("model_type", "with_kernels"), [("qwen3", False), ("qwen3_next", False), *((each, True) for each in TYPES)]
)
def test_flops_are_those_of_the_products_inside(model_type: str, with_kernels: bool, monkeypatch) -> None:
    monkeypatch.setattr(products, "visible", everything)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | TYPES[model_type])).to("npu")
    if with_kernels:
        kernels_ext_npu.kernelize(model)
    ids = torch.randint(128, (1, 64)).npu()
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as profiled,
        Labelled() as seen,
    ):
        model.train()(ids, labels=ids).loss.backward()
        model.eval().generate(ids, max_new_tokens=2, do_sample=False)
    inside = computed(profiled)
    assert len(inside) > 20
    wrong = {
        seen.names[call]: (inside[call], counted)
        for call, counted in enumerate(seen.counted)
        if inside[call] != counted and seen.names[call] not in UNPROFILED
    }
    assert not wrong, f"operator: (flops on the software device, flops counted): {wrong}"
    assert not [name for name in seen.names if is_unknown(name)]


def test_attention_multiplies_what_its_mode_shows() -> None:
    """Of aclnnFlashAttentionScore: 2 is causal from the first key, 3 to the last, 4 a band along that diagonal."""
    lengths = ((7, 7), (3, 8), (8, 3), (1, 6))
    bands = ((2**31, 2**31), (2, 0), (0, 0), (1, 3), (20, 20), (-1, 2))
    for (queries, keys), mode, (before, behind) in product(lengths, range(5), bands):
        shift = 0 if mode == 2 else keys - queries
        lowest = shift - before if mode == 4 else -keys - queries
        highest = {2: shift, 3: shift, 4: shift + behind}.get(mode, keys)
        expected = sum(i + lowest <= j <= i + highest for i, j in product(range(queries), range(keys)))
        assert visible(queries, keys, mode, before, behind) == expected, (queries, keys, mode, before, behind)


def test_every_formula_of_the_software_device_that_multiplies_is_known_to_multiply() -> None:
    """By its source: a formula with a product in it, or in what it calls, is of an operator that the table has.

    Or its name tells, and an inspection remarks that its flops are unknown.
    """
    calls: dict[str, set[str]] = {}
    multiplying = set()
    for path in Path(softnpu.formulas.__path__[0]).glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef):
                parts = list(ast.walk(function))
                names = {part.id for part in parts if isinstance(part, ast.Name)}
                names |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
                calls.setdefault(function.name, set()).update(names)
                multiplying |= {function.name} if any(map(is_product, parts)) else set()
    while more := {name for name, called in calls.items() if called & multiplying} - multiplying:
        multiplying |= more
    operators = {name.partition(".")[0] for name, function in FORMULAS.items() if function.__name__ in multiplying}
    assert len(operators) > 20
    assert {name for name in operators if not multiplies(name) and not is_unknown(name)} == set(WITHOUT_PRODUCTS)


def is_product(node: ast.AST) -> bool:
    """Tell whether a piece of source multiplies matrices."""
    called = node.func if isinstance(node, ast.Call) else None
    return (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)) or (
        isinstance(called, ast.Attribute)
        and called.attr in ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "linear", "conv1d", "conv2d")
    )
