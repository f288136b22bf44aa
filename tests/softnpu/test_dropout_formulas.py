"""Dropout with a mask of bits: what is kept is scaled, the gradient has the same mask, and the generator decides."""

import pytest
import torch
import torch_npu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_what_is_kept_is_scaled_and_the_rest_is_zero(p: float, dtype: torch.dtype) -> None:
    x = torch.linspace(1, 2, 4000).to(dtype).npu().requires_grad_()
    y, mask = torch_npu._npu_dropout(x, p)
    assert mask.dtype == torch.uint8
    assert mask.numel() * 8 == 4096  # a multiple of 128 bits
    kept = y.detach().cpu() != 0
    assert abs(kept.float().mean().item() - (1 - p)) <= 0.03  # four standard deviations of 4000 draws
    scaled = x.detach().cpu().float() / max(1 - p, 1e-9)
    assert torch.equal(y.detach().cpu(), torch.where(kept, scaled, 0.0).to(dtype))
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad.cpu(), (kept / max(1 - p, 1e-9)).to(dtype))


def test_the_generator_of_the_device_decides() -> None:
    x = torch.ones(256, device="npu")
    torch.npu.manual_seed(3)
    first, second = torch_npu._npu_dropout(x, 0.5)[0], torch_npu._npu_dropout(x, 0.5)[0]
    torch.npu.manual_seed(3)
    assert torch.equal(torch_npu._npu_dropout(x, 0.5)[0].cpu(), first.cpu())
    assert not torch.equal(first.cpu(), second.cpu())


def test_a_cast_to_the_same_dtype_is_a_tensor_of_its_own() -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    y = torch.ops.npu._npu_dtype_cast(x, torch.float32)
    assert y.data_ptr() != x.data_ptr()
    assert y.grad_fn is not None
