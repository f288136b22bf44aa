"""The tables of what is served: by kind for the READMEs, for the best-known models, and the page of all model types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import transformers

import softnpu  # noqa: F401  before torch
from documents import DocumentError
from kernels_ext_npu.catalogue import KINDS, Kind
from kernels_ext_npu.coverage import tables
from kernels_ext_npu.coverage.survey import Row, survey
from kernels_ext_npu.coverage.tables import columns, display_name
from kernels_ext_npu.matching.classification import COUNTED, without_code

# The newest language and vision-language models of those who publish most of them, their mixtures of
# experts and hybrids, and earlier ones that are still trained everywhere.
BEST_KNOWN = (
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_linear",
    "glm4",
    "glm4_moe",
    "glm4v",
    "minimax_m2",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "seed_oss",
    "internvl",
    "llama",
    "llama4",
    "gpt_oss",
    "gemma3",
    "gemma4",
    "mistral",
    "mixtral",
    "phi3",
    "olmo3",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2",
    "falcon_h1",
    "t5",
)

_CHINESE = {
    "kernel": "算子",
    "for": "对象",
    "served": "已支持",
    "not served": "保留原实现",
    "model type": "模型类型",
    "norms": "归一化层",
    "layer norms": "LayerNorm 类",
    "hyper-connections": "超连接（hyper-connection）",
    "forget gates": "遗忘门",
    "gated MLPs": "门控 MLP",
    "rotary functions": "旋转位置编码函数",
    "rotary tables": "旋转位置编码表（cos、sin）",
    "experts": "专家层",
    "routers": "路由",
    "indexers": "索引器（选择键）",
    "compressors": "压缩器（合并键）",
    "activations": "激活函数",
    "with": "含",
}
_SENTENCES = {
    "en": (
        "Classes and functions of transformers {version}, for {types} model types:",
        "[In words, and for the best-known models](docs/served.md). [All model types, and the reasons for what is not "
        "served](docs/coverage.md).",
    ),
    "zh": (
        "transformers {version} 的类和函数，共 {types} 种模型类型：",
        "[文字说明，以及最常用的模型](docs/served.zh.md)。[所有模型类型，以及保留原实现的原因](docs/coverage.md)（英文）。",
    ),
}
_CELL_MEANINGS = {
    "en": "Served of all; `–` where there is nothing of the kind, and *with* before other model types that a model has "
    "parts of, unless its config names others:",
    "zh": "已支持数 / 总数；`–` 表示没有这类对象；*含* 之后是其部分组件默认所属的其他模型类型：",
}

_INTRODUCTION = """\
# What of transformers {version} is served

Written by `make docs`: what `kernels-ext-npu coverage` finds in the modeling files of transformers.
`kernels-ext-npu coverage qwen3` names each class and function of a model type, and `kernels-ext-npu coverage` counts
those of the transformers that is installed.

**Served** means that a kernel computes what the class or function computes; the syntax tree decides, not the name.
What is **not served** keeps its forward, for the reasons below. What can stand in the way of an instance, such as an
activation that a kernel does not have, is in `report(model)`.

**Model types** are what `model_type` in a `config.json` says. transformers has a folder for those of a family and says
which it is: a row is a folder, and its numbers are about the classes and functions that its modeling files define. A
model type whose folder has no modeling file is in the row of the class that transformers makes for it. Many models are
made of models in other folders: *with* names those that it takes unless a config names others.
Activations are in the sums only: all but Bloom's are in `activations.py` of transformers, for models of all types.
"""


def page() -> bytes:
    """Return docs/coverage.md: sums, a row for each folder of transformers, and what is not served and why."""
    kernels = [kernel.name for kernel in columns(_rows())]
    by_type = [[_all_types(row), *_cells(row)] for row in tables.not_empty(_rows())]
    parts = [
        _INTRODUCTION.format(version=transformers.__version__),
        f"## {tables.counted(_rows())}\n",
        "Cells are served of all; `–` where there is nothing of the kind.\n",
        _table(["kernel", "for", "served", "not served"], tables.sums(_rows()), right=2),
        "## By model type\n",
        _table(["model types", *kernels], by_type, right=len(kernels)),
        f"{tables.nothing_to_serve(_rows(), quote='`')}\n",
        "## What is not served, and why\n",
        *filter(None, map(_unsupported, KINDS)),
    ]
    return "\n".join(parts).encode()


def summary(language: str) -> str:
    """Return what of each kind is served and what is not, with links from a README to the cards of the kernels."""
    count = sum(len(row.folder.model_types) for row in _rows())
    sums = [
        [f"[{kernel}]({kernel}/README.md)", _word(kind, language), *numbers]
        for kernel, kind, *numbers in tables.sums(_rows())
    ]
    headers = [_word(text, language) for text in ("kernel", "for", "served", "not served")]
    first, last = _SENTENCES[language]
    return "\n".join(
        [
            first.format(version=transformers.__version__, types=count) + "\n",
            _table(headers, sums, right=2),
            last + "\n",
        ]
    )


def best_known(language: str) -> str:
    """Return what of the best-known model types is served: a row for each, a column for each kernel."""
    rows = {model_type: row for row in _rows() for model_type in row.folder.model_types}
    kernels = [kernel.name for kernel in columns(_rows())]
    known = [[_name(name, rows[name], _word("with", language)), *_cells(rows[name])] for name in BEST_KNOWN]
    table = _table([_word("model type", language), *kernels], known, right=len(kernels))
    return f"{_CELL_MEANINGS[language]}\n\n{table}"


def _word(english: str, language: str) -> str:
    return _CHINESE.get(english, english) if language == "zh" else english


def _name(model_type: str, row: Row, word: str) -> str:
    parts = ", ".join(f"`{part}`" for part in row.parts)
    return f"`{model_type}`" + (f" *{word}* {parts}" if parts else "")


def _all_types(row: Row) -> str:
    name = ", ".join(f"`{model_type}`" for model_type in row.folder.model_types)
    if row.parts:
        name += f"<br>*with* {', '.join(f'`{part}`' for part in row.parts)}"
    return name + "".join(f"<br>`{file}` {why}" for file, why in row.missing.items())


def _cells(row: Row) -> list[str]:
    """Return a cell for each of the kernels that have a column: what is served of what there is."""
    return [tables.cell(row.entries_for(kernel)) for kernel in columns(_rows())]


def _unsupported(kind: Kind) -> str:
    """Return the table of what is not served of a kind, by the codes of the reasons; nothing where all is."""
    found = [
        [
            reason.code,
            without_code(reason),
            ", ".join(f"`{name}`" for name in sorted(map(display_name, entries))),
        ]
        for reason, entries in tables.unsupported_by_reason(_rows(), kind).items()
    ]
    return f"### {kind.name.capitalize()}\n\n{_table(['why', 'reason', 'which'], found, right=0)}" if found else ""


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: int) -> str:
    """Return a table in Markdown, with the last columns to the right."""
    rules = ["---"] * (len(headers) - right) + ["---:"] * right
    return "".join(f"| {' | '.join(row)} |\n" for row in (headers, rules, *rows))


@cache
def _rows() -> list[Row]:
    if transformers.__version__ != COUNTED:
        raise DocumentError(
            f"the documents are about transformers {COUNTED}, and {transformers.__version__} is installed: pip install "
            f"transformers=={COUNTED}, or bring unsupported.json and COUNTED in classification.py up to date"
        )
    return survey()
