"""What the cards of the kernels say of their functions: the examples run, and the tables name what is there."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernels import get_local_kernel
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_OPERATORS = {"CrossEntropy", "Linear"}  # of torch_npu: their examples compute by those of torch
REPOSITORIES = sorted(path.parent.name for path in ROOT.glob("*/build.toml"))


def card(repository: str) -> str:
    return (ROOT / repository / "README.md").read_text()


def smaller(size: re.Match[str]) -> str:
    """A sixteenth of a hidden size; numbers of tokens and sizes of heads stay."""
    return str(int(size[0]) // 16 if int(size[0]) > 256 else size[0])


def run_examples(repository: str) -> dict:
    """Run the examples that call the kernel itself, one after the other, with smaller sizes, and give their names."""
    blocks = re.findall(r"```python\n(.*?)```", card(repository), re.DOTALL)
    names: dict = {"get_kernel": lambda *_, **__: get_local_kernel(ROOT / repository)}
    torch.manual_seed(0)
    for code in blocks:
        if "from_pretrained" not in code:
            code = code.replace("from kernels import get_kernel\n", "")
            exec(re.sub(r"(?<![.\d])\d{3,5}\b", smaller, code), names)
    return names


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_the_examples_with_the_kernel_itself_run(repository: str, npu_counters) -> None:
    names = run_examples(repository)
    assert f'kernels_ext_npu.load("{repository}")' in card(repository)
    assert any(name.startswith("npu_") for name in npu_counters()) or repository in WITHOUT_OPERATORS
    assert all(v.isfinite().all() for v in names.values() if isinstance(v, Tensor) and v.is_floating_point())


def attribute(kernel: ModuleType, name: str) -> object:
    for part in name.split("."):
        kernel = getattr(kernel, part)
    return kernel


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_the_tables_name_what_the_package_exports(repository: str) -> None:
    """Functions and layers: all that the package has, and nothing that it does not have."""
    kernel = get_local_kernel(ROOT / repository)
    text = card(repository)
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    called = [name for row in rows for name in re.findall(r"`([\w.]+)\(", row)]
    assert all(callable(attribute(kernel, name.removesuffix(".apply"))) for name in called)
    parts = {name for name in kernel.__all__ if isinstance(getattr(kernel, name), ModuleType)}
    named = (
        {name.partition(".")[0] for name in called}
        | set(re.findall(r"`(\w+)` is `\w+\(\)`", text))
        | {"layers"} & parts
    )
    assert named == set(kernel.__all__), parts
