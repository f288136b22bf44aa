"""The comparison with other projects: both languages say the same, what is said of others can be looked up, and what is
said of this one is so.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.cli import app
from tests.distributed import matrix

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ["comparison.md", "comparison.zh.md"]
# a branch moves on, and with it the lines that a link names
PINNED = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/"
    r"(blob/([0-9a-f]{40}|v\d+(\.\d+)+)/[^#\s]+#L\d+(-L\d+)?"
    r"|tree/([0-9a-f]{40}|v\d+(\.\d+)+)/[^#\s]+"
    r"|releases/tag/v\d+(\.\d+)+"
    r"|(pull|issues)/\d+)"
)
# how the table calls an engine of tests/distributed/matrix.py, in either language
ENGINES = {
    "DDP": ("DDP", "DDP"),
    "FSDP1": ("FSDP", "FSDP"),
    "FSDP2": ("FSDP", "FSDP"),
    "TP": ("tensor", "张量并行"),
    "EP": ("expert parallelism", "专家并行"),
}
# what the repositories of kernels compute
SERVED = {
    "Activation": ("activations", "激活函数"),
    "FlashAttention": ("attention", "注意力"),
    "CrossEntropy": ("head with loss", "输出头与损失"),
    "Linear": ("linear layers", "线性层"),
    "LinearAttention": ("linear attention", "线性注意力"),
    "RMSNorm": ("RMS norms", "RMS 归一化"),
    "SwiGLU": ("gated MLPs", "门控 MLP"),
    "FusedMoE": ("experts, routers", "专家、路由器"),
    "RoPE": ("rotary functions", "旋转函数"),
}


def _targets(page: str) -> list[str]:
    """Where the links of a page lead, in the order of the text."""
    text = (DOCS / page).read_text()
    defined = dict(re.findall(r"^\[(\d+)\]: (\S+)$", text, re.MULTILINE))
    text = re.sub(r"^\[\d+\]: \S+$", "", text, flags=re.MULTILINE)
    uses = re.findall(r"\]\(([^)]+)\)|\[(\d+)\]", text)
    assert {number for _, number in uses if number} == set(defined), "a number without a source, or the other way round"
    return [target or defined[number] for target, number in uses]


def _table(page: str) -> list[list[str]]:
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("|---")]


def _ours(topic: str) -> tuple[str, str]:
    """What is said of this project in both languages, in the row that is called so in English."""
    english, chinese = map(_table, PAGES)
    (number,) = [number for number, row in enumerate(english) if row[0] == topic]
    return english[number][1], chinese[number][1]


def test_both_languages_have_the_same_links_and_cells() -> None:
    english, chinese = ([target.replace(".zh.md", ".md") for target in _targets(page)] for page in PAGES)
    assert english == chinese
    # cell by cell, so that a source cannot slip to the neighbour, and what is code is no translation
    linked = re.compile(r"\[\d+\]|\]\([^)]+\)|`[^`]+`")
    english, chinese = ([[sorted(linked.findall(cell)) for cell in row] for row in _table(page)] for page in PAGES)
    assert english == chinese


@pytest.mark.parametrize("page", PAGES)
def test_every_cell_about_another_project_has_a_source(page: str) -> None:
    projects, *rows = _table(page)
    assert len(projects) == 7
    assert len(rows) >= 10
    for topic, _ours, *theirs in rows:
        assert len(theirs) == 5, topic
        assert all(re.search(r"\[\d+\]", cell) for cell in theirs), topic


@pytest.mark.parametrize("page", PAGES)
def test_sources_are_pinned_and_pages_exist(page: str) -> None:
    for target in _targets(page):
        if target.startswith("http"):
            assert PINNED.fullmatch(target), target
            continue
        path, _, anchor = target.partition("#")
        assert (DOCS / path).is_file(), target
        headings = re.findall(r"^#+ (.+)$", (DOCS / path).read_text(), re.MULTILINE)
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings], target


def test_devices_and_engines_are_those_of_the_tests() -> None:
    """tests/distributed/test_same_numbers.py trains under each engine, on as many devices as the matrix says."""
    counts = sorted({setup.ranks for setup in matrix.ENGINES.values()})
    engines = {part.partition(",")[0] for name in matrix.ENGINES for part in name.split(" × ")}
    assert engines == ENGINES.keys()
    english, chinese = _ours("Several devices")
    assert f"on {' and '.join(map(str, counts))} software devices" in english
    assert f"{'和 '.join(f'{count} 个' for count in counts)}软件设备" in chinese
    for name in engines:
        assert ENGINES[name][0] in english
        assert ENGINES[name][1] in chinese


def test_what_is_here_is_served_and_what_is_not_is_said_to_be_missing() -> None:
    served, missing = _ours("Operators, of those that are here"), _ours("What they have and this has not")
    assert set(REPOSITORIES) == SERVED.keys(), "the table has to say what they compute, and nothing else"
    for name, words in SERVED.items():
        assert all(word.lower() in cell.lower() for word, cell in zip(words, served)), name
        lacks = [f"no {words[0]}", f"没有{words[1]}"]
        assert not any(lack.lower() in cell.lower() for lack, cell in zip(lacks, missing)), name


def test_every_kernel_is_compiled_by_its_tests_as_the_table_says() -> None:
    """A call of torch.compile in the tests of each repository has the arguments that stand there."""
    for cell in _ours("`torch.compile`"):
        assert re.findall(r"`([^`]+)`", cell) == ["fullgraph=True", "aot_eager"]
    for repository in REPOSITORIES:
        (package,) = [path.name for path in (ROOT / repository / "torch-ext").iterdir() if path.is_dir()]
        calls = [
            {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            for path in (ROOT / "tests" / package).glob("test_*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.compile"
        ]
        assert any(call.items() >= {("fullgraph", "True"), ("backend", "'aot_eager'")} for call in calls), repository


def test_calls_and_commands_of_ours_exist() -> None:
    """All that is code in our cells: a function with its argument, a keyword of `register`, a command."""
    cells = " ".join(row[1] for row in _table("comparison.md")[1:])
    commands = {command.callback.__name__ for command in app.registered_commands}
    elsewhere = {
        "use_kernels=True",  # transformers'
        "(1 + weight)",
        "npu_rotary_mul",  # torch_npu's
        *("torch.compile", "fullgraph=True", "aot_eager"),  # torch's
    }
    found = set(re.findall(r"`([^`]+)`", cells)) - elsewhere
    assert len(found) > 5
    for code in found:
        if code.startswith("kernels-ext-npu "):
            assert code.split()[1] in commands, code
        elif call := re.fullmatch(r"(\w+)\((\w*)(?:=\w+)?\)", code):
            parameters = inspect.signature(getattr(kernels_ext_npu, call[1])).parameters
            assert not call[2] or call[2] in parameters, code
        else:
            assert code.partition("=")[0] in inspect.signature(kernels_ext_npu.register).parameters, code
