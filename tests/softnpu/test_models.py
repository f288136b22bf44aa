"""Whole models without kernels: the software device gives what the CPU gives, for every architecture of the zoo."""

import pytest

from tests.support import zoo
from tests.support.agreement import assert_agrees


@pytest.mark.parametrize(
    "name",  # those with kernels are compared in tests/integration/whole_models/test_kernelized_models.py
    [pytest.param(name, marks=[pytest.mark.long] * (i % 4 > 0)) for i, name in enumerate(zoo.ARCHITECTURES)],
)
# padded caches of hybrids
@pytest.mark.filterwarnings("ignore:npu_fusion_attention_v3. atten_mask leaves a row nothing")
def test_logits_gradients_and_tokens_are_the_cpus(name: str) -> None:
    assert_agrees(name, zoo.build(name).to("npu"))


def test_the_zoo_has_sixty_architectures_of_every_kind() -> None:
    families = [architecture.family for architecture in zoo.ARCHITECTURES.values()]
    assert len({name.partition("-")[0] for name in zoo.ARCHITECTURES}) >= 60
    for family in ("dense", "moe", "vision-language", "state-space"):
        assert families.count(family) >= 4
