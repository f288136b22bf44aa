"""Which variant of each repository `kernels` takes, and why none of the others."""

from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from kernels import get_local_kernel
from kernels.variants import VariantAccepted, get_variants_local, parse_variant, resolve_variants

from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.distribution.variants import names

ROOT = Path(__file__).resolve().parent.parent.parent
NOARCH = ["torch-npu", "torch-universal"]
# of other machines; none of them is ours
DECOYS = [
    f"torch{release}-{abi}-{backend}-{machine}-linux"
    for release in ("26", "27", "28", "29", "210", "213")
    for abi, backend, machine in (
        ("cxx98", "cann82", "aarch64"), ("cxx11", "cann82", "x86_64"), ("cxx11", "cann81", "aarch64"),
        ("cxx11", "cpu", "aarch64"), ("cxx11", "cu126", "aarch64"),
    )
]  # fmt: skip


def taken(kernel: ModuleType) -> str:
    return Path(kernel.__file__).parent.name


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_of_all_variants_the_one_for_this_machine_is_taken(
    kernels, repositories: Path, variant: str, repository: str
) -> None:
    assert taken(kernels[repository]) == variant
    found = get_variants_local(repositories / repository / "build")
    assert {each.variant_str for each in found} == set(names(ROOT))
    accepted, decisions = resolve_variants([*found, *map(parse_variant, DECOYS)])
    expected = [variant, *NOARCH] if variant not in NOARCH else NOARCH
    assert [each.variant_str for each in accepted] == expected
    for decision in decisions:
        if not isinstance(decision, VariantAccepted):
            assert decision.variant.variant_str not in expected
            assert decision.reason
            print(f"{repository}: {decision.variant.variant_str}: {decision.reason}")


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_without_it_those_for_all_machines_serve(
    repositories: Path, variant: str, repository: str, tmp_path: Path
) -> None:
    """The one for all NPUs, and without that the universal one."""
    build = tmp_path / "build"
    build.mkdir()
    for each in (repositories / repository / "build").iterdir():
        (build / each.name).symlink_to(each)
    remaining = NOARCH if variant not in NOARCH else NOARCH[NOARCH.index(variant) + 1 :]
    gone = [variant, *remaining]
    for before, after in pairwise(gone):
        (build / before).unlink()
        assert taken(get_local_kernel(tmp_path)) == after
