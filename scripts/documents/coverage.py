"""The tables of what is served: by kind for the READMEs, for the best-known models, and the page of all model types."""

from __future__ import annotations

from functools import cache

import transformers

import softnpu  # noqa: F401  before torch
from documents import DocumentError
from kernels_ext_npu.coverage import tables
from kernels_ext_npu.coverage.survey import Row, survey
from kernels_ext_npu.coverage.tables import columns
from kernels_ext_npu.matching.classification import COUNTED

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
    "gated MLPs": "门控 MLP",
    "rotary functions": "旋转位置编码函数",
    "rotary tables": "旋转位置编码表（cos、sin）",
    "experts": "专家层",
    "routers": "路由",
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
_CELLS = {
    "en": "Served of all; `–` where there is nothing of the kind, and *with* before other model types that a model has "
    "parts of, unless its config names others:",
    "zh": "已支持数 / 总数；`–` 表示没有这类对象；*含* 之后是其部分组件默认所属的其他模型类型：",
}


def page() -> bytes:
    """Return docs/coverage.md."""
    return tables.page(_rows()).encode()


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
            tables.table(headers, sums, right=2),
            last + "\n",
        ]
    )


def best_known(language: str) -> str:
    """Return what of the best-known model types is served: a row for each, a column for each kernel."""
    rows = {model_type: row for row in _rows() for model_type in row.folder.model_types}
    kernels = [kernel.name for kernel in columns(_rows())]
    known = [
        [_name(name, rows[name], _word("with", language)), *tables.cells(_rows(), rows[name])] for name in BEST_KNOWN
    ]
    table = tables.table([_word("model type", language), *kernels], known, right=len(kernels))
    return f"{_CELLS[language]}\n\n{table}"


def _word(english: str, language: str) -> str:
    return _CHINESE.get(english, english) if language == "zh" else english


def _name(model_type: str, row: Row, word: str) -> str:
    parts = ", ".join(f"`{part}`" for part in row.parts)
    return f"`{model_type}`" + (f" *{word}* {parts}" if parts else "")


@cache
def _rows() -> list[Row]:
    if transformers.__version__ != COUNTED:
        raise DocumentError(
            f"the documents are about transformers {COUNTED}, and {transformers.__version__} is installed: pip install "
            f"transformers=={COUNTED}, or bring unsupported.json and COUNTED in classification.py up to date"
        )
    return survey()
