"""Which rotary functions a kernel serves: what they do decides, and nothing else gets a kernel for the NPU."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernels.layer.globals import _KERNEL_MAPPING
from transformers.integrations import hub_kernels

import kernels_ext_npu
from kernels_ext_npu.matching.lookup import find_pattern
from tests.support import served

SOURCE = '''
import torch
from transformers.integrations import use_kernel_forward_from_hub

def double(function):
    return lambda *a, **k: [2 * x for x in function(*a, **k)]

def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat({halves}, dim=-1)

{decorator}
def apply_rotary_pos_emb({parameters}):
    """A docstring, and {changed}."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    a = (q * cos) {operator} (rotate_half(q) * sin)
    b = (k * cos) + (rotate_half(k) * sin)
    return a, b

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)
'''
USUAL = {
    "halves": "(-x2, x1)",
    "decorator": "",
    "parameters": "q, k, cos, sin, unsqueeze_dim=1",
    "operator": "+",
    "changed": "nothing",
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A modeling file that is written as Llama's, with changes."""

    def write(**changes: str) -> ModuleType:
        (tmp_path / "modeling_written.py").write_text(SOURCE.format(**USUAL | changes))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "modeling_written", raising=False)
        return importlib.import_module("modeling_written")

    yield write
    sys.modules.pop("modeling_written", None)


@pytest.mark.parametrize(
    ("changes", "matches"),
    [
        ({}, True),
        ({"decorator": '@use_kernel_forward_from_hub("rotary_pos_emb")'}, True),
        ({"decorator": "@double"}, False),
        ({"decorator": '@use_kernel_forward_from_hub("rotary_pos_emb")\n@double'}, False),
        ({"halves": "(x2, x1)"}, False),
        ({"operator": "-"}, False),
        ({"parameters": "q, k, cos, sin, unsqueeze_dim=2"}, False),
        ({"parameters": "q, k, sin, cos, unsqueeze_dim=1"}, False),  # callers may name them
        ({"parameters": "q, k, cos, sin, *, unsqueeze_dim=1"}, False),
    ],
)
def test_what_is_written_otherwise_does_not_match(written, changes, matches) -> None:
    reference = find_pattern(written(**changes).apply_rotary_pos_emb)
    assert (reference is not None) == matches
    assert reference is None or reference.layers[0] == "RotaryPosEmb"


def test_a_decorated_function_that_matches_nothing_gets_no_kernel_for_the_npu(written) -> None:
    """Also where somebody has one for all that transformers decorates as rotary_pos_emb."""
    module = written(decorator='@use_kernel_forward_from_hub("rotary_pos_emb")', operator="-")
    kernels_ext_npu.register()
    table = hub_kernels.get_kernel_mapping_transformers()
    before = table["rotary_pos_emb"]
    table["rotary_pos_emb"] = before | {"npu": table["RotaryPosEmb"]["npu"]}
    try:
        model = module.Attention().to("npu")
        vars(model)["_kernel_funcs"] = {"rotary_pos_emb": module.apply_rotary_pos_emb}
        kernels_ext_npu.kernelize(model)
        (row,) = served.rows(model, "rotary calls")
        assert (row.swapped, row.kernel, row.reason) == (False, None, "no kernel computes what it computes")
        forward = vars(module.apply_rotary_pos_emb).get("forward")
        assert forward is None or forward.__func__ is type(module.apply_rotary_pos_emb).forward
        x, cos = torch.randn(1, 2, 3, 8, device="npu"), torch.randn(1, 3, 8, device="npu")
        found = model(x, x, cos, cos)
        for a, b in zip(found, model(x.cpu(), x.cpu(), cos.cpu(), cos.cpu())):
            torch.testing.assert_close(a.cpu(), b)
    finally:
        table["rotary_pos_emb"] = before
        _KERNEL_MAPPING.get().pop("rotary_pos_emb", None)  # what `kernels` was given of it
    kernels_ext_npu.unregister()
    assert type(module.apply_rotary_pos_emb).kernel_layer_name == "rotary_pos_emb"
    assert not [layer for layer in table if "except npu" in layer]


def test_code_that_is_no_part_of_transformers_is_served_too(written, registered) -> None:
    module = written()
    model = kernels_ext_npu.kernelize(module.Attention().to("npu"))
    (row,) = served.rows(model, "rotary calls")
    assert (row.swapped, row.kernel, row.path) == (True, "RotaryPosEmb", "apply_rotary_pos_emb")
