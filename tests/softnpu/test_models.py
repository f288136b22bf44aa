"""Whole models without kernels: the software device gives what the CPU gives, for every architecture of the zoo."""

from __future__ import annotations

import pytest
import torch
import zoo

# float32 through up to a few dozen operations a layer, relative to the norm of the result
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
@pytest.mark.filterwarnings(
    "ignore:npu_fusion_attention_v3. atten_mask leaves a row nothing"
)  # padded caches of hybrids
def test_logits_gradients_and_tokens_are_the_cpus(name: str) -> None:
    reference, device = zoo.build(name), zoo.build(name).to("npu")
    inputs = zoo.inputs(name, reference)
    moved = {key: value.to("npu") for key, value in inputs.items()}
    expected, found = reference(**inputs), device(**moved)
    for a, b in zip(zoo.tensors(found), zoo.tensors(expected), strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) <= TOLERANCE

    zoo.loss(expected).backward()
    zoo.loss(found).backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    moved_gradients = {n: p.grad for n, p in device.named_parameters() if p.grad is not None}
    assert gradients.keys() == moved_gradients.keys()
    whole = torch.stack([g.float().norm() for g in gradients.values()]).norm().item()
    for n, gradient in gradients.items():
        assert (moved_gradients[n].cpu() - gradient).norm() <= TOLERANCE * whole, n

    if zoo.can_generate(name):
        tokens = [m.generate(**i, max_new_tokens=4, do_sample=False) for m, i in ((device, moved), (reference, inputs))]
        assert torch.equal(tokens[0].cpu(), tokens[1])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def test_the_zoo_has_sixty_architectures_of_every_kind() -> None:
    families = [architecture.family for architecture in zoo.ARCHITECTURES.values()]
    assert len({name.partition("-")[0] for name in zoo.ARCHITECTURES}) >= 60
    for family in ("dense", "moe", "vision-language", "state-space"):
        assert families.count(family) >= 4
