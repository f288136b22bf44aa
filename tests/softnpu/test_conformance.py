"""Every formula against the wheel: the parameters of its schema, the shapes and dtypes of its own meta kernel.

The list of formulas is the registry of softnpu; a formula fails that has no samples here, and is in no case of
test_formulas.py.
"""

import inspect
import re
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import softnpu
from softnpu.aten_missing_on_cpu import FORMULAS as ATEN
from softnpu.formulas import COMPOSED, FORMAT_CASTS, NATIVE
from softnpu.formulas import FORMULAS as NPU
from softnpu.out_of_reach import REFUSED
from tests.softnpu.conformance_samples import SAMPLES, rows
from tests.softnpu.formula_cases import CASES

# returns seed and offset of the dropout mask as CPU tensors outside of graph capture, as op-plugin documents
RETURNS_HOST_TENSORS = {"npu_fusion_attention_v3", "npu_fusion_attention_v3.out"}
# operators whose meta kernel raises
BROKEN_META = {
    "baddbmm.dtype",  # torch's own takes out_dtype for beta
    "npu_fusion_attention_grad_v2",  # torch_npu's makes tensors like the list [0]
    "npu_geglu_grad",  # torch_npu's has no defaults for dim and approximate, and returns two tensors for one
}


# lengths of the CPU and an input of the device, and from the one to the other: test_host_execution.py
OF_TWO_DEVICES = {"_pack_padded_sequence", "_copy_from_and_resize"}
# operators whose meta kernel gives other shapes or dtypes than op-plugin allocates
OTHER_RESULTS = {
    "npu_cross_entropy_loss",  # zloss and what its gradient needs, where op-plugin makes them empty
    "npu_deep_norm_backward",  # gradients of parameters in their dtype, where they are float32
}
# files of formulas in which torch's own dtypes hold
OF_ANY_DTYPE = {"aten_gradients", "batch_norm", "cast", "layouts"}
ALL = {**{name: f"npu::{name}" for name in NPU}, **{name: f"aten::{name}" for name in ATEN}}


class Recording(TorchDispatchMode):
    """Keep what operators of torch_npu are called with, by their names: one call for each dtype and rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[tuple, tuple[tuple, dict]]] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operator.name().removeprefix("npu::")
        if name in NPU:
            kind = tuple((tensor.dtype, tensor.dim()) for tensor in tensors((args, kwargs)))
            self.calls.setdefault(name, {}).setdefault(kind, (move(args, "cpu"), move(kwargs, "cpu")))
        return operator(*args, **kwargs)


@cache
def samples() -> dict[str, list[tuple[tuple, dict]]]:
    """Return the samples of each operator: those listed, and what the cases of test_formulas.py call it with."""
    with Recording() as recording:
        for case in CASES.values():
            for dtypes in case.dtypes:
                leaves = [t.npu().requires_grad_(case.gradients is not None) for t in case.drawn(dtypes)]
                results = tensors(case.call(*leaves))
                if case.gradients is not None:
                    torch.autograd.backward([results[i] for i in case.of], [results[i].detach() for i in case.of])
    return {name: [*SAMPLES.get(name, []), *recording.calls.get(name, {}).values()] for name in ALL}


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


@pytest.mark.parametrize("name", ALL)
def test_results_have_the_shapes_and_dtypes_of_the_meta_kernel(name: str) -> None:
    op = overload(name)
    keys = ("Meta", "CompositeExplicitAutograd") if name not in BROKEN_META else ()
    has_meta = any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)
    differing = []
    for args, kwargs in samples()[name]:
        found = op(*move(args, "npu"), **move(kwargs, "npu"))
        assert all(t.device.type == "npu" for t in tensors(found)) or name in RETURNS_HOST_TENSORS
        if has_meta:
            expected = op(*move(args, "meta"), **move(kwargs, "meta"))
            differing += [(args, kwargs)] * (described(found) != described(expected))
    assert bool(differing) is (name in OTHER_RESULTS), differing


@pytest.mark.parametrize("name", ALL)
def test_strides_of_arguments_change_no_value_and_results_are_contiguous(name: str) -> None:
    """op-plugin allocates them so. Meta kernels that report an argument's strides are wrong about the device.

    Values are the same but for sums in another order, in norm: some cancel, and some are of numbers with 8 bits.
    """
    for args, kwargs in samples()[name]:
        given = tree_map(lambda v: strided(v.to("npu")) if isinstance(v, torch.Tensor) else v, (args, kwargs))
        own = {id(t) for t in tensors(given)}
        results = []
        with softnpu.poisoned_memory():
            for args_here, kwargs_here in (given, (move(args, "npu"), move(kwargs, "npu"))):
                torch.npu.manual_seed(0)
                try:
                    results.append(tensors(overload(name)(*args_here, **kwargs_here)))
                except RuntimeError as refusal:
                    if re.search("contiguous|transposed", str(refusal)):
                        break
                    raise
        for found, expected in zip(*results) if len(results) == 2 else ():
            assert found.is_contiguous() or id(found) in own
            if found.device.type == "npu" and found.dim():  # a scalar may be one that nobody writes
                assert torch.equal(found.isnan(), expected.isnan())
                found, expected = (t.nan_to_num().double().cpu() for t in (found, expected))
                assert (found - expected).norm() <= 2.0**-7 * expected.norm()


@pytest.mark.parametrize("name", NPU)
def test_dtypes_that_an_operator_has_not_are_refused_by_its_name(name: str) -> None:
    args, kwargs = tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, samples()[name][0]
    )
    given = move(args, "npu"), move(kwargs, "npu")
    allocates = name.endswith(("_get_max_workspace", "_infer_output", "gen_mask.Tensor"))
    takes_any = allocates or NPU[name].__module__.rpartition(".")[2] in OF_ANY_DTYPE
    if takes_any or not any(t.is_floating_point() for t in tensors(given)):
        overload(name)(*given[0], **given[1])
        return
    with pytest.raises((RuntimeError, NotImplementedError), match=name.partition(".")[0].strip("_")):
        overload(name)(*given[0], **given[1])


@pytest.mark.parametrize("name", sorted(BROKEN_META))
def test_broken_meta_kernels_are_still_broken(name: str) -> None:
    """One that is repaired belongs to the comparison above."""
    for args, kwargs in samples()[name]:
        with pytest.raises((RuntimeError, TypeError)):
            overload(name)(*move(args, "meta"), **move(kwargs, "meta"))


def test_every_formula_has_samples() -> None:
    assert SAMPLES.keys() <= ALL.keys()
    assert {name for name, given in samples().items() if not given} == OF_TWO_DEVICES


def test_every_operator_without_a_formula_is_refused_with_one_reason() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    names = {name.partition("::")[2] for name in registered if name.startswith("npu::")}
    composed = {name for name, inner in COMPOSED.items() if hasattr(torch.ops.npu, inner)}
    listed = [name for group in REFUSED.values() for name in group.split()]
    assert len(listed) == len(set(listed))
    assert set(listed) == names - NPU.keys() - NATIVE - set(FORMAT_CASTS) - composed


def test_a_refusal_says_why() -> None:
    with pytest.raises(NotImplementedError, match=r"npu::npu_prefetch: .*reads or changes the state of a card"):
        torch.ops.npu.npu_prefetch(rows(2).to("npu"), None, 8)


def move(values, device: str):
    return tree_map(lambda v: v.detach().to(device) if isinstance(v, torch.Tensor) else v, values)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Lay the same values out with the dimensions in the opposite order."""
    order = range(tensor.dim() - 1, -1, -1)
    return tensor.permute(*order).contiguous().permute(*order) if tensor.dim() > 1 else tensor


def tensors(values) -> list[torch.Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


def described(values) -> list[tuple]:
    return [(list(t.shape), t.dtype) for t in tensors(values)]
