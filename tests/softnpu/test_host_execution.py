"""What goes wrong, mostly without a word, when operators of a device run on the host: one test for each way."""

import gc
import weakref

import pytest
import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

import softnpu
from softnpu.host_call import HostCall


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.unsqueeze(0),
        lambda t: t.view(2, 6),
        lambda t: t.reshape(6, 2),
        lambda t: t.t(),
        lambda t: t.transpose(0, 1),
        lambda t: t.permute(1, 0),
        lambda t: t[1:],
        lambda t: t[:, ::2],
        lambda t: t.unsqueeze(1).squeeze(1),
        lambda t: t.unsqueeze(1).squeeze(),
        lambda t: t.expand(2, 3, 4)[1],
        lambda t: t.flatten(),
        lambda t: t.unflatten(1, (2, 2)),
        lambda t: t.diagonal(),
        lambda t: t.unfold(1, 2, 2),
        lambda t: t.contiguous(),
        lambda t: t.detach(),
        lambda t: t.narrow(1, 1, 2),
        lambda t: t.select(0, 1),
        lambda t: t.chunk(2, 1)[1],
        lambda t: t.split(1)[2],
        lambda t: t.unbind()[1],
        lambda t: t.movedim(0, 1),
        lambda t: t.view(torch.int32),
        lambda t: torch.view_as_complex(t.view(3, 2, 2)),
        lambda t: t.as_strided((2, 2), (4, 1), 1),
        lambda t: t.swapaxes(0, 1),
        lambda t: t.alias() if hasattr(t, "alias") else t[:],
    ],
)
def test_writes_through_a_view_reach_the_tensor(view) -> None:
    tensors = [torch.arange(12.0, device=device).view(3, 4) for device in ("npu", "cpu")]
    for tensor in tensors:
        view(tensor).fill_(7)
    torch.testing.assert_close(tensors[0].cpu(), tensors[1], rtol=0, atol=0)


def test_results_that_are_views_share_storage_and_version() -> None:
    x = torch.zeros(4, device="npu")
    y = x.unsqueeze(0)
    assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    version = x._version
    y.add_(1)
    assert x._version > version
    assert x.cpu().tolist() == [1.0] * 4


def test_in_place_on_a_tensor_that_backward_needs_is_refused() -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    y = x.exp()
    loss = y.sum()
    y.view(3, 1).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_grad_input_overloads_run() -> None:
    # "npu" is part of their name: grad_i-npu-t
    for function in (torch.sigmoid, F.silu, torch.tanh, F.elu, F.softplus, F.glu, F.gelu):
        gradients = []
        for device in ("npu", "cpu"):
            x = torch.linspace(-2, 2, 8).to(device).requires_grad_()
            function(x).sum().backward()
            gradients.append(x.grad.cpu())
        torch.testing.assert_close(*gradients)
    grad, y = torch.ones(4), torch.linspace(0.1, 0.9, 4)
    out = torch.empty(4, device="npu")
    torch.ops.aten.sigmoid_backward.grad_input(grad.to("npu"), y.to("npu"), grad_input=out)
    torch.testing.assert_close(out.cpu(), torch.ops.aten.sigmoid_backward(grad, y))


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_run_forward_and_backward(module) -> None:
    torch.manual_seed(0)
    reference = module(4, 8, num_layers=2, bidirectional=True)
    device = module(4, 8, num_layers=2, bidirectional=True).to("npu")
    device.load_state_dict(reference.state_dict())
    x = torch.randn(5, 3, 4)
    expected, found = reference(x)[0], device(x.to("npu"))[0]
    torch.testing.assert_close(found.cpu(), expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for a, b in zip(device.parameters(), reference.parameters()):
        torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_boolean_attention_mask_hides_and_is_not_added() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for shape in (mask, mask.view(1, 1, 4, 4)):
        found = F.scaled_dot_product_attention(*(t.to("npu") for t in (q, k, v)), attn_mask=shape.to("npu"))
        torch.testing.assert_close(found.cpu(), expected)


def test_boolean_mask_on_the_composed_path() -> None:
    # three dimensions: torch_npu composes attention of other operators
    q, k, v = (torch.randn(2, 4, 8) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    found = F.scaled_dot_product_attention(*(t.to("npu") for t in (q, k, v)), attn_mask=mask.to("npu"))
    torch.testing.assert_close(found.cpu(), expected)


def test_lazy_conjugate_and_negative_bits_are_kept() -> None:
    z = torch.randn(4, 3, dtype=torch.complex64)
    d = z.to("npu")
    assert torch.equal(d.conj().cpu().resolve_conj(), z.conj().resolve_conj())
    assert torch.equal(d.conj().imag.cpu(), z.conj().imag)
    assert torch.equal(d.conj().clone().cpu(), z.conj().clone())
    torch.testing.assert_close((d.mH @ d).cpu(), z.mH @ z)
    gradients = []
    for tensor in (d, z):
        x = tensor.clone().requires_grad_()
        (x.conj() * x * (1 + 2j)).real.square().sum().backward()
        gradients.append(x.grad.cpu())
    torch.testing.assert_close(*gradients)


def test_writes_through_a_conjugate_view() -> None:
    tensors = [torch.zeros(3, dtype=torch.complex64, device=device) for device in ("npu", "cpu")]
    for tensor in tensors:
        tensor.conj().copy_(torch.full((3,), 1 + 2j))
    torch.testing.assert_close(tensors[0].cpu(), tensors[1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_histc_counts_in_the_dtype_of_its_input(dtype) -> None:
    experts = torch.tensor([0, 2, 2, 3, 3, 3], device="npu").to(dtype)
    for upper in (3, 4):  # both keep the numbers below 4 apart in four bins
        counts = torch.histc(experts, bins=4, min=0, max=upper)
        assert (counts.dtype, counts.tolist()) == (dtype, [1, 0, 2, 3])


def test_histc_waits_for_its_range_only_if_none_is_given() -> None:
    experts = torch.tensor([0, 2, 2, 3], device="npu")
    for options, waits in (({"min": 0, "max": 3}, 0), ({}, 2)):
        softnpu.reset_counters()
        torch.histc(experts, bins=4, **options)
        assert softnpu.counters()["stream_syncs"] == waits


def test_operators_behind_the_autograd_key() -> None:
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    d = x.to("npu")
    torch.testing.assert_close(
        torch.softmax(d, -1, dtype=torch.float32).cpu(), torch.softmax(x, -1, dtype=torch.float32)
    )
    index = torch.tensor([2, 0, 1])
    assert torch.equal(F.one_hot(index.to("npu"), 4).cpu(), F.one_hot(index, 4))
    assert torch.equal(torch.argsort(d, stable=True).cpu(), torch.argsort(x, stable=True))
    assert torch.equal(d.repeat_interleave(2, 0).cpu(), x.repeat_interleave(2, 0))
    counts = torch.tensor([1, 0, 2])
    assert torch.equal(d.repeat_interleave(counts.to("npu"), 0).cpu(), x.repeat_interleave(counts, 0))
    assert torch.equal(d.gather(0, index.to("npu").view(1, 3)).cpu(), x.gather(0, index.view(1, 3)))
    assert torch.equal(torch.where(d > 0, d, -d).cpu(), x.abs())


@pytest.mark.parametrize(
    "shapes", [((4, 3), (3, 5)), ((3,), (3,)), ((2, 4, 3), (3,)), ((3,), (2, 3, 5)), ((2, 1, 4, 3), (5, 3, 2))]
)
def test_matmul_backward(shapes) -> None:
    arguments = [torch.randn(shape) for shape in shapes]
    gradients = []
    for device in ("npu", "cpu"):
        leaves = [t.detach().to(device).requires_grad_() for t in arguments]
        torch.matmul(*leaves).square().sum().backward()
        gradients.append([leaf.grad.cpu() for leaf in leaves])
    torch.testing.assert_close(*gradients)


def test_matmul_has_a_second_derivative() -> None:
    a, b = (torch.randn(3, 3) for _ in range(2))
    results = []
    for device in ("npu", "cpu"):
        x, y = (t.detach().to(device).requires_grad_() for t in (a, b))
        (first,) = torch.autograd.grad(torch.matmul(x, y).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), y)[0].cpu())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-3)


def test_convolution_of_channels_last_input() -> None:
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    expected = conv(x)
    torch.testing.assert_close(conv.to("npu")(x.contiguous().to("npu")).cpu(), expected)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.exp(),
        lambda x: torch.cat([x, x]),
        lambda x: torch.where(x > 0, x, 0),
        lambda x: x.sort(0).values,
        lambda x: x.softmax(0),
        lambda x: torch.linalg.qr(x).Q,
    ],
)
def test_results_are_contiguous_as_op_plugin_allocates_them(compute) -> None:
    result = compute(torch.randn(3, 4).t().to("npu"))
    assert result.is_contiguous()
    assert not torch.randn(3, 4).t().to("npu").clone().is_contiguous()  # torch_npu's CloneKernelOpApi.cpp


def test_results_go_to_the_device_of_the_arguments(run_forked) -> None:
    code = """
import softnpu, torch
assert torch.npu.device_count() == 2
x = torch.ones(3, device="npu:1")
assert torch.npu.current_device() == 0
assert (x + 1).device == torch.device("npu:1")
assert x.unsqueeze(0).device == torch.device("npu:1")
assert torch.zeros_like(x).device == torch.device("npu:1")
assert torch.arange(3, device="npu:1").device == torch.device("npu:1")
try:
    x + torch.ones(3, device="npu:0")
except RuntimeError as error:
    assert "npu:1 and npu:0" in str(error)
else:
    raise SystemExit("two devices were mixed")
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


def test_kernel_launches_without_a_host_implementation_raise() -> None:
    x = torch.ones(8, device="npu")
    with pytest.raises(NotImplementedError, match="npu::npu_sign_bits_pack"):
        torch_npu.npu_sign_bits_pack(x, 1)


def test_no_operator_of_torch_npu_is_left_to_its_own_kernels() -> None:
    """Every npu:: operator has a formula, is known to need none, or raises an error that names it."""
    from softnpu.formulas import FORMULAS, NATIVE

    names = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    operators = {name.removeprefix("npu::") for name in names if name.startswith("npu::")}
    assert FORMULAS.keys() <= operators
    assert operators >= NATIVE
    for name in operators - FORMULAS.keys() - NATIVE:
        assert "softnpu" in torch._C._dispatch_dump_table(f"npu::{name}").split("PrivateUse1: ")[1].split("\n")[0], name


def test_storage_and_allocator_are_torch_npus() -> None:
    before = torch.npu.memory_allocated()
    x = torch.empty(1 << 20, device="npu")
    assert (
        torch.npu.memory_allocated() - before == 4 * (1 << 20) + 512
    )  # torch_npu rounds up, after 32 bytes of its own
    del x
    assert torch.npu.memory_allocated() == before


def test_more_than_the_memory_of_the_device_is_refused() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 36, dtype=torch.uint8, device="npu")


def test_resizing_grows_the_storage() -> None:
    x = torch.arange(3.0, device="npu")
    x.resize_(2, 3)
    assert x.shape == (2, 3)
    assert x[0].tolist() == [0, 1, 2]


def test_saved_and_loaded() -> None:
    import io

    buffer = io.BytesIO()
    torch.save({"a": torch.arange(3.0, device="npu")}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu")["a"].tolist() == [0, 1, 2]
    buffer.seek(0)
    assert torch.load(buffer)["a"].device.type == "npu"


def test_autocast_runs_products_in_bfloat16() -> None:
    x = torch.randn(4, 4, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    assert softnpu.is_software()


INT32 = {
    "one_hot": lambda x, i: F.one_hot(i, 4),
    "nll_loss": lambda x, i: F.nll_loss(x, i),
    "cross_entropy": lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1),
    "nll_loss2d": lambda x, i: F.nll_loss(x.t().view(1, 4, 3, 1), i.view(1, 3, 1)),
    "multilabel_margin_loss": lambda x, i: F.multilabel_margin_loss(x[:, :3], i.expand(3, 3)),
    "put_": lambda x, i: x.clone().put_(i, x[0, :3], accumulate=True),
    "index_fill": lambda x, i: x.index_fill(0, i[:2], 7.0),
    "index_copy": lambda x, i: x.index_copy(0, i, x.flip(0)),
    "take": lambda x, i: x.take(i),
}


@pytest.mark.parametrize("name", INT32)
def test_indices_and_targets_may_be_int32(name: str) -> None:
    x, index = torch.arange(12.0).view(3, 4), torch.tensor([0, 2, 1])
    found = INT32[name](x.to("npu"), index.int().to("npu"))
    expected = INT32[name](x, index)
    torch.testing.assert_close(found.cpu(), expected.int() if name == "one_hot" else expected)


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


def test_lists_on_several_devices_are_taken_one_after_the_other(run_forked) -> None:
    code = """
import softnpu, torch
lists = [torch.ones(2, device="npu:0"), torch.ones(3, device="npu:1")]
torch._foreach_mul_(lists, 3.0)
assert [t.device.index for t in torch._foreach_norm(lists)] == [0, 1]
host = [torch.zeros(2), torch.zeros(3)]
torch._foreach_copy_(host, lists)
assert host[1].tolist() == [3.0] * 3
torch._foreach_copy_(lists, [torch.ones(2), torch.ones(3)])
assert lists[0].tolist() == [1.0] * 2
try:
    torch._foreach_add(lists, host)
except RuntimeError as error:
    assert "two devices, npu:0 and cpu" in str(error)
else:
    raise SystemExit("the device has read memory of the host")
"""
    run_forked(code, SOFTNPU_DEVICES="2")


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


@pytest.mark.parametrize("name", ["_foreach_addcdiv", "_foreach_addcmul"])
def test_scalars_of_a_list_may_lie_on_the_host(name: str) -> None:
    lists = [[torch.rand(2) + 1 for _ in range(3)] for _ in range(3)]
    scalars = torch.tensor([1.0, -2.0, 0.5])
    found = getattr(torch, name)(*([t.npu() for t in tensors] for tensors in lists), scalars)
    for a, b in zip(found, getattr(torch, name)(*lists, scalars)):
        torch.testing.assert_close(a.cpu(), b)


@pytest.mark.parametrize("name", ["__ior__", "__iand__", "__ixor__", "bitwise_or_", "bitwise_and_", "bitwise_xor_"])
@pytest.mark.parametrize("number", [True, 5])
def test_a_number_may_stand_for_a_tensor_in_place(name: str, number: int) -> None:
    x = torch.tensor([0, 1, 6, 7])
    assert getattr(x.npu(), name)(number).tolist() == getattr(x.clone(), name)(number).tolist()


def test_an_affine_grid_has_the_gradient_of_torch() -> None:
    theta = torch.rand(1, 2, 3)
    on_npu, on_cpu = theta.npu().requires_grad_(), theta.clone().requires_grad_()
    for leaf in (on_npu, on_cpu):
        F.affine_grid(leaf, [1, 1, 2, 3], align_corners=False).square().sum().backward()
    torch.testing.assert_close(on_npu.grad.cpu(), on_cpu.grad)


@pytest.mark.parametrize("call", [torch.cdist, lambda a, b: F.pdist(a), lambda a, b: torch._VF._add_relu(a, -b[0])])
def test_what_the_cpu_computes_in_float32_only_is_there_in_16_bits(call) -> None:
    a, b = torch.randn(4, 3).half(), torch.randn(5, 3).half()
    found = call(a.npu(), b.npu()).cpu()
    assert found.dtype == torch.half
    torch.testing.assert_close(found, call(a.float(), b.float()).half())
