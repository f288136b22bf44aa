"""Rotary embedding for inference, and the cache of latent attention, against float64."""

import pytest
import torch
import torch_npu

from tests.softnpu.formula_cases import rotated

# one rounding of values up to 8; float16 rounds the products of npu_apply_rotary_pos_emb too
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}


def by_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbours, as complex numbers, and put the real parts first."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turn = torch.complex(cos.double(), sin.double())[..., : pairs.shape[-1]]
    turned = pairs * turn
    return torch.cat([turned.real, turned.imag], -1)


def angles(*shape, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, the same for both halves of the last dimension."""
    angle = torch.rand(*shape[:-1], shape[-1] // 2) * 6
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def compare(found, expected, dtype) -> None:
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lead", [(2, 3), (5,)])
def test_query_and_key_are_rotated_in_place(dtype, lead) -> None:
    q, k = (torch.randn(*lead, n, 64).to(dtype) for n in (4, 2))
    cos, sin = angles(*lead, 1, 64, dtype=dtype)
    on_device = [t.to("npu") for t in (q, k)]
    found = torch_npu.npu_apply_rotary_pos_emb(
        *on_device, cos.to("npu"), sin.to("npu"), "BSND" if len(lead) == 2 else "TND"
    )
    for given, result, x in zip(on_device, found, (q, k)):
        assert torch.equal(given, result)
        compare(given, rotated("half")(*(t.double() for t in (x, cos, sin))), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("s", [1, 5])
def test_interleave_rope(dtype, s) -> None:
    x = torch.randn(2, 3, 5, 64).to(dtype)
    cos, sin = angles(2, 1, s, 64, dtype=dtype)
    found = torch_npu.npu_interleave_rope(*(t.to("npu") for t in (x, cos, sin)))
    compare(found, by_pairs(x, cos, sin), dtype)


@pytest.mark.parametrize("mode", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("section", "cache_mode"),
    [
        (None, "default"),
        ([8, 12, 12], "default"),
        ([8, 12, 12], "interleave"),
        ([24, 20, 20], "interleave"),
        ([16] * 4, "default"),
    ],
)
def test_mrope(mode, section, cache_mode) -> None:
    size = 2 * sum(section) if section else 32
    angle = torch.rand(50, size // 2) * 6
    q, k = torch.randn(7, 3 * 128), torch.randn(7, 128)
    positions = torch.randint(50, (len(section), 7) if section else (7,))
    found = torch_npu.npu_mrope(
        positions.to("npu"), q.to("npu"), k.to("npu"), torch.cat([angle.cos(), angle.sin()], -1).to("npu"), 128,
        mrope_section=section, rotary_mode=mode, cache_mode=cache_mode,
    )  # fmt: skip
    chosen = torch.zeros(size // 2, dtype=torch.int64)
    if section and cache_mode == "default":
        chosen = torch.arange(len(section)).repeat_interleave(torch.tensor(section))
    elif section:
        feature = torch.arange(size // 2)
        chosen = torch.where(feature < 3 * section[1], feature % 3, 0)
    rows = positions[chosen].T if section else positions.unsqueeze(-1).expand(-1, size // 2)
    turn = angle.double().gather(0, rows).unsqueeze(1)
    turn = torch.cat([turn, turn], -1) if mode == "half" else turn.repeat_interleave(2, -1)
    for result, x in zip(found, (q, k)):
        heads = x.double().view(7, -1, 128)
        turned = rotated(mode)(heads[..., :size], turn.cos(), turn.sin())
        compare(result, torch.cat([turned, heads[..., size:]], -1).flatten(1), torch.float32)


@pytest.mark.parametrize("paged", [False, True])
def test_latents_are_normed_rotated_and_kept(paged) -> None:
    dtype = torch.bfloat16
    kv, gamma = torch.randn(2, 1, 3, 576).to(dtype), torch.rand(512).to(dtype)
    cos, sin = angles(2, 1, 3, 64, dtype=dtype)
    shape = (4, 4, 1) if paged else (2, 1, 8)
    caches = [torch.zeros(*shape, size, dtype=dtype, device="npu") for size in (64, 512)]
    index = torch.tensor([5, 0, 3, 9, 15, 4]) if paged else torch.tensor([[5, 0, 3], [7, 1, 4]])
    *kept, rotated, normed = torch_npu.npu_kv_rmsnorm_rope_cache(
        *(t.to("npu") for t in (kv, gamma, cos, sin, index)), *caches, cache_mode="PA" if paged else "Norm",
        is_output_kv=True,
    )  # fmt: skip
    x = kv[..., :512].double()
    exact = (
        by_pairs(kv[..., 512:], cos, sin),
        x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double(),
    )
    for cache, returned, new, out in zip(caches, kept, exact, (rotated, normed)):
        assert torch.equal(cache, returned)
        expected = torch.zeros(cache.shape, dtype=torch.float64)
        if paged:
            expected.view(16, -1)[index] = new.reshape(6, -1)
            compare(out, new, dtype)
        else:
            for i in range(2):
                expected[i, 0, index[i]] = new[i, 0]
            assert out.isnan().all()
        compare(cache, expected, dtype)
