"""``register(kernels=...)``: some of the kernels, so that one can look for the one that makes a difference."""

import pytest
from transformers.integrations import hub_kernels

import kernels_ext_npu
from kernels_ext_npu.catalogue import (
    COMPRESSORS,
    FORGET_GATES,
    HEADS,
    HYPER_CONNECTIONS,
    INDEXERS,
    LAYER_NORMS,
    RECURRENCES,
    REPOSITORIES,
    SERVING,
)
from tests.support import zoo

NAMES = ", ".join(REPOSITORIES)

OTHER_KERNELS = (LAYER_NORMS, HYPER_CONNECTIONS, RECURRENCES, FORGET_GATES, INDEXERS, COMPRESSORS)
# of those that qwen3_next has modules for
KINDS_BY_KERNEL = {
    repository.name: {kind.in_models for kind in repository.kinds if kind not in OTHER_KERNELS}
    for repository in SERVING
    if repository.name not in ("Activation", "Linear")
}


@pytest.mark.parametrize("kernel", KINDS_BY_KERNEL)
def test_one_kernel_serves_its_kinds_alone(kernel: str) -> None:
    kernels_ext_npu.register(kernels=[kernel], strict=True)  # what was left out on purpose is no defect
    model = kernels_ext_npu.kernelize(zoo.build("qwen3_next").to("npu"))
    rows = [row for row in kernels_ext_npu.report(model) if row.kind != HEADS.in_models]
    assert {row.kind for row in rows if row.swapped} == KINDS_BY_KERNEL[kernel]
    assert {row.kind for row in rows} == set().union(*KINDS_BY_KERNEL.values())
    for row in rows:
        repository = next(name for name, kinds in KINDS_BY_KERNEL.items() if row.kind in kinds)
        left_out = f"register(kernels=['{kernel}']) leaves {repository} out"
        assert row.reason == (None if repository == kernel else left_out)


def test_without_any_the_model_is_the_original() -> None:
    kernels_ext_npu.register(kernels=[])
    model = kernels_ext_npu.kernelize(zoo.build("qwen3_moe").to("npu"))
    assert not [row for row in kernels_ext_npu.report(model) if row.swapped]


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("RMSNorm", r"is one name; give a list, such as \['RMSNorm'\]"),
        (["RoPe"], rf"no kernel 'RoPe': did you mean RoPE\? there are {NAMES}$"),
        (["Convolution"], f"no kernel 'Convolution': there are {NAMES}$"),
        ([None], f"no kernel None: there are {NAMES}$"),
    ],
)
def test_a_name_that_is_none_changes_nothing(registered, kernels, message: str) -> None:
    table = hub_kernels.get_kernel_mapping_transformers()
    before = {layer: dict(entry) for layer, entry in table.items()}
    with pytest.raises(ValueError, match=message):
        kernels_ext_npu.register(kernels=kernels)
    assert "npu" in before["SwiGLUMLP"]
    assert {layer: dict(entry) for layer, entry in table.items()} == before
