"""The examples that a reader copies do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import zoo

ROOT = Path(__file__).resolve().parent.parent
CARDS = ["README.md", *(str(path.parent.relative_to(ROOT) / "README.md") for path in ROOT.glob("*/build.toml"))]


@pytest.mark.parametrize("card", CARDS)
def test_the_example_with_a_model_runs(card: str, run_python, tmp_path: Path) -> None:
    """On the software device, with a small model and the kernels of this clone: no network is at hand."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / card).read_text(), re.DOTALL)
    example = next(code for code in examples if "from_pretrained" in code)
    zoo.build("qwen3").save_pretrained(tmp_path)
    code = example.replace('"Qwen/Qwen3-8B"', repr(str(tmp_path))).replace('source="hub"', f"source={str(ROOT)!r}")
    assert code != example
    output = run_python(f"import softnpu\n{code}").stdout
    counts = re.findall(r"(\d+) of (\d+) (?:norms|gated MLPs|rotary calls|rotary tables)", " ".join(output.split()))
    assert len(counts) == 4
    assert all(swapped == found != "0" for swapped, found in counts)


def test_links_lead_somewhere() -> None:
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
