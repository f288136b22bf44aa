"""What goes wrong, mostly without a word, when operators of a device run on the host: one test for each way."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from softnpu.host_call import HostCall


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.unsqueeze(0),
        lambda t: t.transpose(0, 1),
        lambda t: t[:, ::2],
        lambda t: t.expand(2, 3, 4)[1],
        lambda t: t.unfold(1, 2, 2),
        lambda t: t.detach(),
        lambda t: t.split(1)[2],
        lambda t: t.view(torch.int32),
        lambda t: torch.view_as_complex(t.view(3, 2, 2)),
        lambda t: t.as_strided((2, 2), (4, 1), 1),
    ],
)
def test_writes_through_a_view_reach_the_tensor(view) -> None:
    tensors = [torch.arange(12.0, device=device).view(3, 4) for device in ("npu", "cpu")]
    for tensor in tensors:
        view(tensor).fill_(7)
    torch.testing.assert_close(tensors[0].cpu(), tensors[1], rtol=0, atol=0)


def test_in_place_on_a_tensor_that_backward_needs_is_refused() -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    y = x.exp()
    loss = y.sum()
    y.view(3, 1).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- the same on both devices ----------------------------------------------------------------------------------------
Move = Callable[[Tensor], Tensor]
X, INDEX = torch.arange(12.0).view(3, 4), torch.tensor([0, 2, 1])
Z = torch.complex(X.sin(), X.cos())
EXPERTS = torch.tensor([0, 2, 2, 3, 3, 3])


def with_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    y = function(*leaves)
    y.square().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def recurrent(module: type[nn.Module], to: Move) -> list[Tensor]:
    torch.manual_seed(0)
    made = module(4, 8, num_layers=2, bidirectional=True).to(to(X).device)
    made(to(torch.randn(5, 3, 4)))[0].square().sum().backward()
    return [parameter.grad for parameter in made.parameters()]


def conjugated(to: Move) -> list[Tensor]:
    written = to(Z).clone()
    written.conj().copy_(to(Z) * 2)
    return [to(Z).conj().clone(), to(Z).conj().imag.clone(), to(Z).mH @ to(Z), written]


# what is given takes tensors to the device, and is an index of int32 there
SAME: dict[str, Callable[[Move, Tensor], object]] = {
    # "npu" is part of the name of its overload: grad_i-npu-t
    "a gradient into a given tensor": lambda to, i: torch.ops.aten.sigmoid_backward.grad_input(
        to(X), to(X / 12), grad_input=to(torch.empty(3, 4))
    ),
    # of three dimensions, for which torch_npu composes attention of other operators
    "a boolean mask of attention": lambda to, i: F.scaled_dot_product_attention(
        *[to(X.sin().expand(2, 3, 4))] * 3, attn_mask=to(torch.ones(3, 3, dtype=torch.bool).tril())
    ),
    "LSTM": lambda to, i: recurrent(nn.LSTM, to),
    "GRU": lambda to, i: recurrent(nn.GRU, to),
    "RNN": lambda to, i: recurrent(nn.RNN, to),
    "conjugates": lambda to, i: conjugated(to),
    "gradients of conjugates": lambda to, i: with_gradients(lambda z: (z.conj() * z * (1 + 2j)).real, to(Z)),
    "affine_grid": lambda to, i: with_gradients(
        lambda theta: F.affine_grid(theta, [1, 1, 2, 3], align_corners=False), to(X[:2, :3][None].sin())
    ),
    # bins of one number each: both upper limits keep the numbers below 4 apart
    "histc of float32": lambda to, i: [torch.histc(to(EXPERTS.float()), bins=4, min=0, max=n) for n in (3, 4)],
    **{
        f"{name} with scalars of the host": lambda to, i, name=name: getattr(torch, name)(
            *[list(to(X + 1).unbind()) for _ in range(3)], torch.tensor([1.0, -2.0, 0.5])
        )
        for name in ("_foreach_addcdiv", "_foreach_addcmul")
    },
    **{
        f"{name} of {number}": lambda to, i, name=name, number=number: getattr(to(EXPERTS).clone(), name)(number)
        for name in ("__ior__", "__iand__", "__ixor__", "bitwise_or_", "bitwise_and_", "bitwise_xor_")
        for number in (True, 5)
    },
    "nll_loss": lambda to, i: F.nll_loss(to(X), i),
    "nll_loss2d": lambda to, i: F.nll_loss(to(X).t().view(1, 4, 3, 1), i.view(1, 3, 1)),
    "multilabel_margin_loss": lambda to, i: F.multilabel_margin_loss(to(X)[:, :3], i.expand(3, 3)),
    "put_": lambda to, i: to(X).clone().put_(i, to(X)[0, :3], accumulate=True),
    "index_fill": lambda to, i: to(X).index_fill(0, i[:2], 7.0),
    "index_copy": lambda to, i: to(X).index_copy(0, i, to(X).flip(0)),
    "take": lambda to, i: to(X).take(i),
}


@pytest.mark.parametrize("name", SAME)
def test_it_gives_what_the_cpu_gives(name: str) -> None:
    found, expected = SAME[name](Tensor.npu, INDEX.int().npu()), SAME[name](Tensor.cpu, INDEX)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_what_is_int32_stays_so() -> None:
    for dtype in (torch.int64, torch.int32):
        counts = torch.histc(EXPERTS.npu().to(dtype), bins=4, min=0, max=3)
        assert (counts.dtype, counts.tolist()) == (dtype, [1, 0, 2, 3])
    assert torch.equal(F.one_hot(INDEX.int().npu(), 4).cpu(), F.one_hot(INDEX, 4).int())


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.softmax(0),
        lambda x: torch.linalg.qr(x).Q,
    ],
)
def test_results_are_contiguous_as_op_plugin_allocates_them(compute) -> None:
    result = compute(torch.randn(3, 4).t().to("npu"))
    assert result.is_contiguous()
    assert not torch.randn(3, 4).t().to("npu").clone().is_contiguous()  # torch_npu's CloneKernelOpApi.cpp


def test_results_go_to_the_devices_of_the_arguments(run_forked) -> None:
    code = """
import pytest, softnpu, torch
assert torch.npu.device_count() == 2
x = torch.ones(3, device="npu:1")
assert torch.npu.current_device() == 0
assert (x + 1).device == torch.device("npu:1")
assert x.unsqueeze(0).device == torch.device("npu:1")
assert torch.zeros_like(x).device == torch.device("npu:1")
assert torch.arange(3, device="npu:1").device == torch.device("npu:1")
with pytest.raises(RuntimeError, match="npu:1 and npu:0"):
    x + torch.ones(3, device="npu:0")
lists = [torch.ones(2, device="npu:0"), torch.ones(3, device="npu:1")]  # one device after the other
torch._foreach_mul_(lists, 3.0)
assert [t.device.index for t in torch._foreach_norm(lists)] == [0, 1]
host = [torch.zeros(2), torch.zeros(3)]
torch._foreach_copy_(host, lists)
assert host[1].tolist() == [3.0] * 3
torch._foreach_copy_(lists, [torch.ones(2), torch.ones(3)])
assert lists[0].tolist() == [1.0] * 2
with pytest.raises(RuntimeError, match="two devices, npu:0 and cpu"):  # the device reads no memory of the host
    torch._foreach_add(lists, host)
"""
    run_forked(code, SOFTNPU_DEVICES="2")


def test_an_alias_keeps_the_storage_alive() -> None:
    x = torch.full((1000,), 3.0, device="npu")
    storage = weakref.ref(x.untyped_storage())
    host = HostCall("test").alias(x)
    del x
    gc.collect()
    assert storage() is not None
    torch.empty(1000, device="npu").fill_(-1)  # would take over the block if it were free
    assert host.sum() == 3000
    del host
    gc.collect()


def test_tensors_of_the_host_are_refused() -> None:
    x = torch.ones(3, 3, device="npu")
    for call in (lambda: x + torch.ones(3), lambda: torch.mm(x, torch.ones(3, 3)), lambda: x.copy_(x) + torch.ones(1)):
        with pytest.raises(RuntimeError, match=r"Expected NPU tensor, .* at least two devices, npu:0 and cpu"):
            call()
    assert (x + torch.tensor(2.0)).cpu().eq(3).all()  # a scalar can be sent along


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_softmax_of_16_bits_may_stay_in_float32(dtype: torch.dtype) -> None:
    """The tolerance is that of float32 for a sum of five numbers."""
    x = torch.linspace(-3, 3, 10).view(2, 5).to(dtype)
    for operator, own in ((torch.ops.aten._softmax, torch.softmax), (torch.ops.aten._log_softmax, torch.log_softmax)):
        found = operator(x.to("npu"), 1, True)
        torch.testing.assert_close(found.cpu(), own(x.double(), 1).float())
        assert operator(x.to("npu"), 1, False).dtype == dtype
    grad = torch.ops.aten._softmax_backward_data(found, found, 1, dtype)
    assert grad.dtype == dtype


def test_a_packed_sequence_keeps_its_padding_between_the_rows() -> None:
    torch.manual_seed(0)
    lstm, x, lengths = nn.LSTM(3, 4), torch.randn(5, 3, 3), torch.tensor([5, 3, 2])
    packed = nn.utils.rnn.pack_padded_sequence(x.to("npu"), lengths)
    assert torch.equal(packed.data.cpu(), x.flatten(0, 1))
    assert packed.batch_sizes.tolist() == [3, 3, 2, 1, 1]
    results = []
    for device in ("cpu", "npu"):
        output, state = lstm.to(device)(nn.utils.rnn.pack_padded_sequence(x.to(device), lengths))
        results.append([t.cpu() for t in (nn.utils.rnn.pad_packed_sequence(output)[0], *state)])
    torch.testing.assert_close(*results)
    with pytest.raises(RuntimeError, match="'lengths' argument should be a CPU tensor"):
        nn.utils.rnn.pack_padded_sequence(x.to("npu"), lengths.to("npu"))


def test_what_lies_behind_a_shrunk_storage_is_not_a_number_and_cannot_be_written() -> None:
    x = torch.arange(4.0, device="npu")
    x.untyped_storage().resize_(8)
    copy = x.clone()
    assert copy[:2].tolist() == [0.0, 1.0]
    assert copy[2:].isnan().all()
    with pytest.raises(RuntimeError, match="ends behind its storage"):
        x.add_(1)


@pytest.mark.parametrize("call", [torch.cdist, lambda a, b: F.pdist(a), lambda a, b: torch._VF._add_relu(a, -b[0])])
def test_what_the_cpu_computes_in_float32_only_is_there_in_16_bits(call) -> None:
    a, b = torch.randn(4, 3).half(), torch.randn(5, 3).half()
    found = call(a.npu(), b.npu()).cpu()
    assert found.dtype == torch.half
    torch.testing.assert_close(found, call(a.float(), b.float()).half())
