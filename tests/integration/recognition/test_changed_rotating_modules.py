"""What a module that rotates holds is watched, and it is copied, stored and moved as ever."""

import copy
import gc
import io
import weakref

import pytest
import torch

import kernels_ext_npu
from tests.integration.recognition.blocks import said
from tests.integration.recognition.rotating_blocks import Block, assert_same, kernelized, launched
from tests.integration.recognition.spellings import other_peoples_rotating_modules as others
from tests.integration.recognition.spellings.other_peoples_rotating_modules import (
    B,
    CachedPairs,
    D,
    FourDimensions,
    N,
    QueriesAndKeys,
    S,
    heads,
)
from tests.support.served import rows


def other_base(part) -> None:
    part.base = 500
    part.rope_init()


CHANGES = {
    "written to": lambda part: part.cache.mul_(2),
    "replaced": lambda part: setattr(part, "cache", part.cache.flip(0)),
    "built again": other_base,
    "cast": lambda part: part.bfloat16(),
    "a longer table": lambda part: setattr(part, "cache", part.cache.repeat(2, 1, 1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_table_that_changed_is_seen(registered, change) -> None:
    plain = CachedPairs()
    model, x = kernelized(copy.deepcopy(plain)), heads(False)
    model(x.npu())
    for part in (plain, model.part):
        change(part.cpu())
    model.to("npu")
    assert_same(model(x.npu()), plain(x))
    kernels_ext_npu.kernelize(model)
    assert launched(lambda: model(x.npu())) == 1
    assert_same(model(x.npu()), plain(x))


def test_a_table_that_is_loaded_is_seen(registered) -> None:
    plain = QueriesAndKeys()
    model, x = kernelized(copy.deepcopy(plain)), heads()
    model(x.npu(), x.npu())
    plain.cos.copy_(torch.randn_like(plain.cos))
    model.part.load_state_dict(plain.state_dict())
    assert launched(lambda: model(x.npu(), x.npu())) == 2
    assert_same(model(x.npu(), x.npu()), plain(x, x))


def test_a_changed_setting_is_its_own_until_it_is_looked_at_again(registered) -> None:
    plain = others.Louder()
    model, x = kernelized(copy.deepcopy(plain)), heads()
    model(x.npu())
    plain.mscale = model.part.mscale = 3.0
    assert launched(lambda: model(x.npu())) == 0
    assert_same(model(x.npu()), plain(x))
    (row,) = rows(model)
    assert "its settings are others now; kernelize(model)" in row.reason
    kernels_ext_npu.kernelize(model)
    assert launched(lambda: model(x.npu())) == 1
    assert_same(model(x.npu()), plain(x))


@pytest.mark.parametrize("cls", [others.Louder, others.OwnHelper, others.NumbersAndAHelper])
def test_a_helper_that_was_replaced_is_seen(registered, monkeypatch, cls) -> None:
    model, x = kernelized(cls()), heads().npu()
    monkeypatch.setattr(others, "rotate_half", lambda x: -x)
    assert launched(lambda: model(x)) == 0
    kernels_ext_npu.kernelize(model)
    assert launched(lambda: model(x)) == 0
    assert not any(row.swapped for row in rows(model))
    monkeypatch.undo()
    kernels_ext_npu.kernelize(model)
    assert launched(lambda: model(x)) == 1


def test_a_class_with_another_forward_is_computed(registered) -> None:
    class Changing(FourDimensions):
        """Gets another forward."""

        def forward(self, x):
            return super().forward(x)

    model, x = kernelized(Changing()), heads().npu()
    assert launched(lambda: model(x)) == 1
    Changing.forward = lambda self, x: 2 * x
    assert torch.equal(model(x), 2 * x)


def test_hooks_see_each_call_once_and_what_it_gives(registered) -> None:
    model, x, seen = kernelized(FourDimensions()), heads().npu(), []
    model.part.register_forward_hook(lambda *args: seen.append(args[-1]))
    assert launched(lambda: model(x)) == 1
    (result,) = seen
    assert_same(result, FourDimensions()(x.cpu()))


def test_tables_that_are_trained_get_their_gradient(registered) -> None:
    plain = QueriesAndKeys()
    model, x = kernelized(copy.deepcopy(plain)), heads()
    for part, given in ((model.part, x.npu()), (plain, x)):
        part.cos.requires_grad_()
        part(given, given)[0].sum().backward()
    # sums of some hundred numbers in another order
    torch.testing.assert_close(model.part.cos.grad.cpu(), plain.cos.grad, rtol=1e-5, atol=1e-4)


def test_it_is_taken_out_and_a_copy_keeps_it(registered) -> None:
    model, x = kernelized(FourDimensions()), heads().npu()
    twin = copy.deepcopy(model)
    kernels_ext_npu.restore(model)
    assert launched(lambda: model(x)) == 0
    assert said(model) == [("RotaryPosEmb", False)]
    assert launched(lambda: twin(x)) == 1
    assert_same(twin(x), model(x).cpu())


def test_a_pickle_has_the_forward_of_the_class(registered) -> None:
    model, x = kernelized(FourDimensions()), heads().npu()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert launched(lambda: loaded(x)) == 0
    assert launched(lambda: kernels_ext_npu.kernelize(loaded)(x)) == 1


def test_on_the_cpu_it_computes_itself_and_back_on_the_npu_by_the_kernel(registered) -> None:
    model, x = kernelized(FourDimensions()), heads()
    expected = model(x.npu()).cpu()
    model.cpu()
    assert launched(lambda: model(x)) == 0
    assert_same(model(x), expected)
    model.to("npu")
    assert launched(lambda: model(x.npu())) == 1


def test_a_model_without_weights_is_served_too(registered) -> None:
    with torch.device("meta"):
        model = kernels_ext_npu.kernelize(Block(CachedPairs()))
    assert said(model) == [("RotaryPosEmbInterleaved", True)]
    model.to_empty(device="npu")
    model.part.rope_init()
    model.part.to("npu")
    x = heads(False)
    assert launched(lambda: model(x.npu())) == 1
    assert_same(model(x.npu()), CachedPairs()(x))


def test_a_module_lives_no_longer_than_its_owner_wants(registered) -> None:
    model = kernelized(FourDimensions())
    model(heads().npu())
    alive = weakref.ref(model.part.cos_cached), weakref.ref(model.part)
    del model
    gc.collect()  # a module and the forward that is bound to it hold each other
    assert [each() for each in alive] == [None, None]


def test_compiled_it_computes_itself(registered) -> None:
    model, x = kernelized(FourDimensions()), heads()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(compiled(x.npu()), FourDimensions()(x))


def test_a_graph_rotates_by_what_its_tables_hold_when_it_is_replayed(registered) -> None:
    plain = QueriesAndKeys()
    model, x = kernelized(copy.deepcopy(plain)), heads().npu()
    model(x, x)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        results = model(x, x)
    model.part.cos.mul_(2)
    plain.cos.mul_(2)
    graph.replay()
    assert_same(results, plain(x.cpu(), x.cpu()))


def test_inside_a_transform_of_functions_it_computes_itself(registered) -> None:
    plain = FourDimensions()
    model, x = kernelized(copy.deepcopy(plain)), torch.randn(3, B, N, S, D)
    assert_same(torch.func.vmap(model)(x.npu()), torch.func.vmap(plain)(x))


def test_in_inference_mode_it_is_served(registered) -> None:
    plain = FourDimensions()
    model, x = kernelized(copy.deepcopy(plain)), torch.randn(B, 400, S, D)
    with torch.inference_mode():
        assert launched(lambda: model(x.npu())) == 1
        assert_same(model(x.npu()), plain(x))
    ours, theirs = (each.requires_grad_() for each in (x.npu(), x.clone()))
    model(ours).sum().backward()
    plain(theirs).sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-5)
