"""The README and the pages that it leads to: examples do what they say, and both languages say the same."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kernels_ext_npu import catalogue
from kernels_ext_npu.cli import app
from tests.support import zoo

ROOT = Path(__file__).resolve().parent.parent
CARDS = sorted(str(path.parent.relative_to(ROOT) / "README.md") for path in ROOT.glob("*/build.toml"))
# small models in place of those that the examples load
MODELS = {
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-30B-A3B": "qwen3_moe",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
    "openai/clip-vit-base-patch32": "clip",
}
# what they keep: CLIP's norms have a mean, and are one launch
UNSUPPORTED = {"clip": ("norms",)}
# no model has all kinds
RARE = (
    *(catalogue.LAYER_NORMS, catalogue.HYPER_CONNECTIONS, catalogue.PATCHES),
    *(catalogue.RECURRENCES, catalogue.FORGET_GATES, catalogue.INDEXERS, catalogue.COMPRESSORS),
)

# whose commands run here, but for those that have tests of their own; so has recipes.md
PAGES = ["README.md", "docs/offline.md", "docs/software-device.md"]
CHINESE = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.zh.md"), *ROOT.glob("docs/*.zh.md")])
# what cannot be run by a test of this machine, and where else it is
ELSEWHERE = {
    "make demo": "tests/integration/demo/test_demo.py runs the command that it calls",
    "make test": "that is what runs this",
    ".venv/bin/python -m softnpu examples/": "tests/docs/test_example_scripts.py runs them",
    "python examples/": "tests/docs/test_recipes.py runs them",
    "source /usr/local/Ascend": "needs CANN",
    **dict.fromkeys(
        ("for kernel in", "    hf download", "done", "tar "), "tests/integration/distribution/test_offline.py runs them"
    ),
    "pip install": "makes the environment of the tests; tests/test_packaging.py installs the package",
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_run(page: str, run_python, run_forked, tmp_path: Path) -> None:
    """Of kernels-ext-npu, whose commands have tests of their own, there are such ones with such options."""
    (tmp_path / "script.py").write_text("import torch; print(torch.ones(2, device='npu').sum().item())")
    environment: dict[str, str] = {}
    for line in "".join(blocks(page, "sh")).splitlines():
        command, *arguments = shlex.split(line, comments=True)
        if command == "kernels-ext-npu":
            assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0, line
        elif command == "export":
            environment.update(argument.split("=") for argument in arguments)
        elif not line.startswith(tuple(ELSEWHERE)):
            run, launcher = {
                "python": (run_forked, ()),
                "torchrun": (run_python, ("-m", "torch.distributed.run")),
            }[command]
            run(None, *launcher, *arguments, directory=tmp_path, **environment)


@pytest.mark.parametrize("page", CHINESE)
def test_both_languages_say_the_same(page: str) -> None:
    pages = [page.replace(".zh.md", ".md"), page]
    english, chinese = ((ROOT / page).read_text() for page in pages)
    for language in ("sh", "python"):
        assert blocks(pages[0], language) == blocks(pages[1], language)
    for pattern in (r"^#+ ", r"^- ", r"^\|", r"^<!-- "):
        found = [len(re.findall(pattern, page, re.MULTILINE)) for page in (english, chinese)]
        assert found[0] == found[1], pattern
    links = [  # of a heading only the page: its name is in the language
        {re.sub(r"(\.zh)?\.md(#.*)?$", ".md", link) for link in re.findall(r"\]\(([^)]+)\)", page)}
        for page in (english, chinese)
    ]
    assert links[0] == links[1]
    numbers = [sorted(re.findall(r"\d+(?:\.\d+)+", page)) for page in (english, chinese)]
    assert numbers[0] == numbers[1]


def test_the_example_with_a_function_gives_the_norm(run_forked) -> None:
    """In bfloat16, whose step is 2^-8."""
    (code,) = [code for code in blocks("README.md", "python") if "kernels_ext_npu.load" in code]
    check = "print(((y - torch.nn.functional.rms_norm(x.float(), (4096,), eps=1e-6)).norm() / y.norm()).item())"
    assert float(run_forked(f"import softnpu\n{code}{check}").stdout) < 2**-8


def test_the_examples_with_models_run(run_forked, tmp_path: Path) -> None:
    """On the software device, with small models and the kernels of this clone: no network is at hand."""
    examples = [example(page, tmp_path) for page in ("README.md", *CARDS)]
    results = [run_forked(f"import softnpu\n{code}") for code, _ in examples]
    kinds = {repository.name: repository.kinds for repository in catalogue.CATALOGUE}
    kinds[""] = (catalogue.NORMS, catalogue.MLPS, catalogue.ROTARY, catalogue.TABLES)
    for page, result, (code, model) in zip(("README.md", *CARDS), results, examples, strict=True):
        if "report(" not in code:  # attention by its name, without this package
            assert code.rstrip().endswith(f"print(model.config._attn_implementation)  # {catalogue.IMPLEMENTATION}")
            assert result.stdout.split()[-1] == catalogue.IMPLEMENTATION
            continue
        shown = [kind for kind in kinds[Path(page).parent.name] if kind not in RARE]
        assert_all_swapped(result.stdout, *(shown or [catalogue.HEADS]), besides=UNSUPPORTED.get(model, ()))


def example(page: str, folder: Path) -> tuple[str, str]:
    """The first that loads a model, with a small one in its place, and which that is."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    code = next(code for code in examples if "from_pretrained" in code)
    name = re.search(r'from_pretrained\(\s*"([^"]+)"', code)[1]
    model = MODELS[name]
    zoo.build(model).save_pretrained(folder / model)
    code = code.replace(f'"{name}"', repr(str(folder / model))).replace('source="hub"', f"source={str(ROOT)!r}")
    code = code.replace("import get_kernel", "import get_local_kernel").replace("kernels-ext-npu/", f"{ROOT}/")
    code = re.sub(r"get_kernel\((\S+), version=\S+, trust_remote_code=\S+\)", r"get_local_kernel(Path(\1))", code)
    code = f"from pathlib import Path\n{code}"
    return code, model


def assert_all_swapped(output: str, *kinds: catalogue.Kind, besides: Sequence[str] = ()) -> None:
    names = "|".join(kind.in_models for kind in (*catalogue.KINDS, catalogue.HEADS))
    counts = re.findall(rf"(\d+) of (\d+) ({names})", " ".join(output.split()))
    assert {kind for _, _, kind in counts} >= {kind.in_models for kind in kinds}
    assert all(swapped == found != "0" for swapped, found, kind in counts if kind not in besides)


def test_every_page_is_reached_from_the_readme() -> None:
    """In both languages, by links."""
    docs = set(ROOT.glob("docs/*.md"))
    for start in ("README.md", "README.zh.md"):
        reached: set[Path] = set()
        waiting = {ROOT / start}
        while waiting:
            page = waiting.pop()
            reached.add(page)
            targets = re.findall(r"\]\((?!https?:)([^)#]+\.md)", page.read_text())
            waiting |= docs.intersection((page.parent / target).resolve() for target in targets) - reached
        assert docs <= reached


def test_the_tree_in_contributing_names_every_room() -> None:
    (tree,) = re.findall(r"^## Tree\n```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    named, folder = set(), ""
    for line in tree.splitlines():
        inner, name = re.match(r"( *)(\S+)", line).groups()
        folder = folder if inner else name
        named.add(folder + name if inner else name)
    assert all((ROOT / name.partition("<")[0]).exists() for name in named)
    integration = ROOT / "integration/kernels_ext_npu"
    rooms = {path for path in integration.glob("*.py") if path.name != "__init__.py"}
    for parent in (ROOT, integration, ROOT / "softnpu", ROOT / "scripts"):
        rooms |= {path.parent for path in parent.glob("*/__init__.py")}
    missing = {str(path.relative_to(ROOT)) + "/" * path.is_dir() for path in rooms} - named
    assert not missing
