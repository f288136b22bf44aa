"""The examples that a reader copies do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import zoo

ROOT = Path(__file__).resolve().parent.parent
CARDS = ["README.md", *(str(path.parent.relative_to(ROOT) / "README.md") for path in ROOT.glob("*/build.toml"))]
# small models in place of those that the examples load
MODELS = {"Qwen/Qwen3-8B": "qwen3", "Qwen/Qwen3-30B-A3B": "qwen3_moe"}
KINDS = {
    "qwen3": {"norms", "gated MLPs", "rotary calls", "rotary tables"},
    "qwen3_moe": {"norms", "experts", "routers", "rotary calls", "rotary tables"},
}


@pytest.mark.parametrize("card", CARDS)
def test_the_example_with_a_model_runs(card: str, run_python, tmp_path: Path) -> None:
    """On the software device, with a small model and the kernels of this clone: no network is at hand."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / card).read_text(), re.DOTALL)
    example = next(code for code in examples if "from_pretrained" in code)
    name = re.search(r'"(Qwen/[^"]+)"', example)[1]
    model = MODELS[name]
    zoo.build(model).save_pretrained(tmp_path)
    code = example.replace(f'"{name}"', repr(str(tmp_path))).replace('source="hub"', f"source={str(ROOT)!r}")
    output = run_python(f"import softnpu\n{code}").stdout
    counts = re.findall(rf"(\d+) of (\d+) ({'|'.join(KINDS[model])})", " ".join(output.split()))
    assert {kind for _, _, kind in counts} == KINDS[model]
    assert all(swapped == found != "0" for swapped, found, _ in counts)


def test_links_lead_somewhere() -> None:
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
