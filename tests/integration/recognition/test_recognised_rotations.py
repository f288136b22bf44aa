"""Rotary functions of other people's code are served because of what they compute, in whatever words."""

import copy
import sys
import types
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kernels_ext_npu
import softnpu
from tests.integration.recognition.rotating_blocks import as_list, launched, on
from tests.integration.recognition.spellings import other_peoples_rotations as others
from tests.integration.recognition.spellings.other_peoples_rotations import (
    LOOKALIKES,
    SERVED,
    D,
    N,
    S,
    T,
    caller,
    heads,
    table,
)
from tests.support.served import rows


def kernelized(name: str) -> nn.Module:
    model = caller(name)()
    model.place = nn.Parameter(torch.zeros(1, device="npu"))
    return kernels_ext_npu.kernelize(model)


def said(model: nn.Module) -> list[tuple[str | None, bool]]:
    return [(row.kernel, row.swapped) for row in rows(model) if row.function]


@pytest.fixture(params=SERVED)
def served(request, registered):
    """A model with kernels on the NPU that calls a rotary function, the function, arguments, and the layer."""
    torch.manual_seed(0)
    layer, arguments = SERVED[request.param]
    plain = getattr(others, request.param)  # kernelize() puts a module in its place
    return kernelized(request.param), plain, arguments(), layer


def test_it_is_served_by_the_layer_that_computes_the_same(served) -> None:
    model, plain, arguments, layer = served
    assert said(model) == [(layer, True)]
    expected = as_list(plain(*arguments))
    assert launched(lambda: model(*on("npu", arguments))) == len(expected)
    for ours, theirs in zip(as_list(model(*on("npu", arguments))), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)  # products of float32 in another order


def test_its_gradients_are_those_of_the_function(served) -> None:
    model, plain, arguments, _ = served
    count = len(as_list(plain(*arguments)))
    leaves = [[x.to(device).requires_grad_() for x in arguments[:count]] for device in ("npu", "cpu")]
    for (function, device), given in zip(((model, "npu"), (plain, "cpu")), leaves, strict=True):
        sum(x.square().sum() for x in as_list(function(*given, *on(device, arguments[count:])))).backward()
    for ours, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
def test_in_16_bits_it_is_as_near_to_float64_as_the_function(served, table_dtype: torch.dtype) -> None:
    model, plain, arguments, _ = served
    count = len(as_list(plain(*arguments)))
    tensors, tables = on("cpu", arguments[:count], torch.bfloat16), on("cpu", arguments[count:], table_dtype)
    truth = as_list(plain(*(x.double() for x in tensors), *on("cpu", tables, torch.float64)))
    theirs = as_list(plain(*tensors, *tables))
    ours = as_list(model(*on("npu", tensors), *on("npu", tables)))
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        assert mine.dtype is other.dtype
        # the kernel rounds once, at the end: by half a unit at most
        limit = (other.double() - exact).norm() + torch.finfo(other.dtype).eps / 2 * exact.norm()
        assert (mine.cpu().double() - exact).norm() <= limit


def test_it_is_no_module_to_hooks_of_all_modules_and_to_a_symbolic_trace(registered) -> None:
    class Rotating(nn.Module):
        def forward(self, x, cos, sin):
            return others.apply_rope_litgpt(x, cos, sin)

    plain, (_, arguments), seen = others.apply_rope_litgpt, SERVED["apply_rope_litgpt"], []
    given = arguments()
    expected, model = plain(*given), kernelized("apply_rope_litgpt")
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    model(*on("npu", given))
    handle.remove()
    assert seen == [model]
    assert isinstance(others.apply_rope_litgpt, nn.Module)
    traced = torch.fx.symbolic_trace(Rotating())
    torch.testing.assert_close(traced(*on("npu", given)).cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_only_looks_like_one_is_left_alone(registered, name: str) -> None:
    found = said(kernelized(name))
    assert found
    assert not any(swapped for _, swapped in found)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("apply_rotary_on_the_host", "the host waits for a number in it"),
        ("apply_rotary_clamped", "it calls clamp"),
        ("apply_rotary_writing", "it writes to its arguments"),
    ],
)
def test_the_report_says_what_no_rotation_does(registered, name: str, reason: str) -> None:
    (row,) = [row for row in rows(kernelized(name)) if row.function]
    assert row.reason == f"no kernel computes what it computes: {reason}"


def test_cos_and_sin_are_asked_for_once_for_all_layers(registered) -> None:
    model = kernelized("apply_rope_litgpt")
    x, cos, sin = heads(N).npu(), table(S, D).npu(), table(S, D).npu()
    expected = model(x, cos, sin)
    softnpu.reset_counters()
    again = model(x, cos, sin)
    assert {name: count for name, count in softnpu.counters().items() if count} == {"npu_rotary_mul": 1}
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_few_tokens_of_inference_are_the_functions_own_until_a_second_layer_has_their_angles(registered) -> None:
    model = kernelized("apply_rope_litgpt")
    x, cos, sin = heads(N).npu(), table(S, D).npu(), table(S, D).npu()
    with torch.no_grad():
        assert [launched(lambda: model(x, cos, sin)) for _ in range(4)] == [0, 0, 1, 1]  # for q, and for k
        assert launched(lambda: model(x, cos.clone(), sin)) == 0
        assert launched(lambda: model(x.repeat(50, 1, 1, 1), cos.clone(), sin)) == 1


def test_views_of_one_table_that_each_layer_makes_are_one_question(registered) -> None:
    model = kernelized("apply_rotary_llama")
    q, cos, sin, positions = on("npu", (heads(N), table(2 * T, D), table(2 * T, D), torch.arange(S)[None]))
    model(q, q, cos[:T], sin[:T], positions)
    softnpu.reset_counters()
    model(q, q, cos[:T], sin[:T], positions)
    assert {name: count for name, count in softnpu.counters().items() if count} == {"npu_rotary_mul": 2}
    shifted = model(q, q, cos[1 : T + 1], sin[1 : T + 1], positions)[0]
    expected, _ = model(q, q, cos[:T], sin[:T], positions + 1)
    torch.testing.assert_close(shifted, expected, rtol=0, atol=0)


def test_cos_that_was_written_to_is_asked_for_again(registered) -> None:
    model, plain = kernelized("apply_rope_litgpt"), others.apply_rope_litgpt
    x, cos, sin = heads(N).npu(), table(S, D).npu(), table(S, D).npu()
    model(x, cos, sin)
    cos.mul_(2)
    torch.testing.assert_close(model(x, cos, sin).cpu(), plain(x.cpu(), cos.cpu(), sin.cpu()), rtol=1e-5, atol=1e-5)


def test_cos_lives_no_longer_than_its_owner_wants(registered) -> None:
    model = kernelized("apply_rope_litgpt")
    cos = table(S, D).npu()
    model(heads(N).npu(), cos, table(S, D).npu())
    alive = weakref.ref(cos)
    del cos
    assert alive() is None


def test_angles_that_are_trained_get_their_gradient(registered) -> None:
    model, plain = kernelized("apply_rope_litgpt"), others.apply_rope_litgpt
    x, sin = heads(N), table(S, D)
    ours, theirs = sin.npu().requires_grad_(), sin.clone().requires_grad_()
    model(x.npu(), x.npu()[0, 0], ours).sum().backward()
    plain(x, x[0, 0], theirs).sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("arguments", [(3,), (T - S,), ()], ids=["an offset", "the last one", "none"])
def test_a_number_may_say_where_positions_begin(registered, arguments) -> None:
    model, plain = kernelized("apply_rotary_neox"), others.apply_rotary_neox
    q, k, cos, sin = heads(N), heads(N), table(1, 1, T, D), table(1, 1, T, D)
    assert launched(lambda: model(*on("npu", (q, k, cos, sin, *arguments)))) == 2
    ours = model(*on("npu", (q, k, cos, sin, *arguments)))
    for mine, theirs in zip(ours, plain(q, k, cos, sin, *arguments), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_a_setting_of_a_call_may_be_another_rotation(registered) -> None:
    model, plain = kernelized("apply_rot_embed"), others.apply_rot_embed
    x, angles = heads(N), table(S, 2 * D)
    for half in (True, False):
        ours: list[Tensor] = []
        assert launched(lambda half=half, ours=ours: ours.append(model(*on("npu", (x, angles)), half=half))) == 1
        torch.testing.assert_close(ours[0].cpu(), plain(x, angles, half=half), rtol=1e-5, atol=1e-5)


def test_angles_may_come_first(registered) -> None:
    model, plain = kernelized("rotary_with_angles_first"), others.rotary_with_angles_first
    angles, x = table(S, D), heads(N)
    leaves = x.npu().requires_grad_(), x.clone().requires_grad_()
    results: list[Tensor] = []
    assert launched(lambda: results.append(model(angles.npu(), t=leaves[0]))) == 1
    results.append(plain(angles, leaves[1]))
    torch.testing.assert_close(results[0].cpu(), results[1], rtol=1e-5, atol=1e-5)
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(leaves[0].grad.cpu(), leaves[1].grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model(angles.npu())


def test_a_function_whose_helper_has_a_kernel_is_found(registered) -> None:
    kernelized("apply_rope_litgpt")
    assert said(kernelized("apply_rope_to_both")) == [("RotaryPosEmb", True)]


def test_an_import_that_fails_when_called_ends_nothing(registered, monkeypatch) -> None:
    script = types.ModuleType("a_script")  # in no package
    monkeypatch.setitem(sys.modules, script.__name__, script)
    exec("def forward(self, x):\n    from .kernels import apply_rope\n    return apply_rope(x)", vars(script))
    model = type("Caller", (nn.Module,), {"forward": script.forward, "__module__": script.__name__})()
    model.place = nn.Parameter(torch.zeros(1, device="npu"))
    kernels_ext_npu.kernelize(model)
    with pytest.raises(ImportError, match="no known parent package"):
        model(model.place)


def test_arguments_may_be_named(registered) -> None:
    model, plain = kernelized("apply_rotary_llama"), others.apply_rotary_llama
    q, k, cos, sin, positions = SERVED["apply_rotary_llama"][1]()
    named = {"sin": sin, "position_ids": positions, "cos": cos}
    assert launched(lambda: model(q.npu(), k.npu(), **{name: each.npu() for name, each in named.items()})) == 2
    ours = model(q.npu(), k.npu(), **{name: each.npu() for name, each in named.items()})
    for mine, theirs in zip(ours, plain(q, k, **named), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="position_ids"):
        model(q.npu(), k.npu(), cos.npu(), sin.npu())


def test_a_helper_that_was_replaced_is_seen(registered, monkeypatch) -> None:
    model = kernelized("apply_rotary_old_llama")
    arguments = on("npu", SERVED["apply_rotary_old_llama"][1]())
    assert launched(lambda: model(*arguments)) == 2
    monkeypatch.setattr(others, "rotate_half", lambda x: -x)
    assert launched(lambda: model(*arguments)) == 0
    (row,) = [row for row in rows(model) if row.function]
    assert not row.swapped
    kernels_ext_npu.kernelize(model)
    assert launched(lambda: model(*arguments)) == 0
    monkeypatch.undo()
    kernels_ext_npu.kernelize(model)
    assert launched(lambda: model(*arguments)) == 2


def test_on_the_cpu_and_after_restore_the_function_computes(registered) -> None:
    model = kernelized("apply_rope_litgpt")
    arguments = heads(N), table(S, D), table(S, D)
    assert launched(lambda: model(*arguments)) == 0
    kernels_ext_npu.restore(model)
    assert launched(lambda: model(*on("npu", arguments))) == 0
    assert said(model) == [("RotaryPosEmb", False)]


def test_after_unregister_the_file_has_its_function() -> None:
    plain = others.apply_rope_litgpt
    kernels_ext_npu.register()
    kernelized("apply_rope_litgpt")
    assert others.apply_rope_litgpt is not plain
    kernels_ext_npu.unregister()
    assert others.apply_rope_litgpt is plain


def test_products_under_autocast_are_the_functions_own(registered) -> None:
    model, plain = kernelized("apply_rotary_einsum"), others.apply_rotary_einsum
    arguments = SERVED["apply_rotary_einsum"][1]()
    with torch.autocast("npu", torch.bfloat16):
        ours = model(*on("npu", arguments))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = plain(*arguments)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]


def test_copies_of_a_model_are_served(registered) -> None:
    model = copy.deepcopy(kernelized("apply_rope_litgpt"))
    arguments = on("npu", (heads(N), table(S, D), table(S, D)))
    assert launched(lambda: model(*arguments)) == 1


def test_compiled_it_is_the_functions_own(registered) -> None:
    model, plain = kernelized("apply_rotary_llama"), others.apply_rotary_llama
    arguments = SERVED["apply_rotary_llama"][1]()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for ours, theirs in zip(compiled(*on("npu", arguments)), plain(*arguments), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_a_graph_rotates_by_what_its_tables_hold_when_it_is_replayed(registered) -> None:
    model, plain = kernelized("apply_rotary_llama"), others.apply_rotary_llama
    arguments = on("npu", SERVED["apply_rotary_llama"][1]())
    model(*arguments)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        results = model(*arguments)
    arguments[2].mul_(2)
    graph.replay()
    for ours, theirs in zip(results, plain(*on("cpu", arguments)), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_have_the_gradients_of_the_function(registered, use_reentrant: bool) -> None:
    model = kernelized("apply_rotary_llama")
    q, *rest = on("npu", SERVED["apply_rotary_llama"][1]())
    gradients = []
    for run in (lambda q: model(q, *rest)[0], lambda q: checkpoint(model, q, *rest, use_reentrant=use_reentrant)[0]):
        leaf = q.clone().requires_grad_()
        run(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)  # the first may be the function's own
