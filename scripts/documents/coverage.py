"""Write the tables of what is served: a short one for the READMEs, and the page with all model types."""

from __future__ import annotations

from functools import cache

import transformers

import softnpu  # noqa: F401  before torch
from documents import DocumentError
from kernels_ext_npu.coverage import markdown
from kernels_ext_npu.coverage.survey import Row, survey
from kernels_ext_npu.matching.kinds import COUNTED, KERNELS

# For the READMEs: the newest language and vision-language models of those who publish most of them, their mixtures of
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
    "kept": "保留原实现",
    "model type": "模型类型",
    "norms": "归一化层",
    "gated MLPs": "门控 MLP",
    "rotary functions": "旋转位置编码函数",
    "rotary tables": "旋转位置编码表（cos、sin）",
    "experts": "专家层",
    "routers": "路由",
    "with": "含",
}
_SENTENCES = {
    "en": (
        "Classes and functions of transformers {version}, for {types} model types:",
        "Served of all, for the best-known ones; `–` where there is nothing of the kind, and *with* before other model "
        "types that a model has parts of, unless its config names others:",
        "[All model types, and the reasons for what is kept](docs/coverage.md).",
    ),
    "zh": (
        "transformers {version} 的类和函数，共 {types} 种模型类型：",
        "其中最常用的模型类型（已支持数 / 总数；`–` 表示没有这类对象；*含* 之后是其部分组件默认所属的其他模型类型）：",
        "[所有模型类型，以及保留原实现的原因](docs/coverage.md)（英文）。",
    ),
}


def page() -> bytes:
    """Write docs/coverage.md."""
    return markdown.page(_rows()).encode()


def summary(language: str) -> str:
    """Write how much of each kind is served, and what of the best-known model types."""

    def word(english: str) -> str:
        return _CHINESE.get(english, english) if language == "zh" else english

    rows = {model_type: row for row in _rows() for model_type in row.folder.model_types}
    sums = [[word(text) for text in line] for line in markdown.sums(_rows())]
    known = [[_name(name, rows[name], word("with")), *markdown.cells(rows[name])] for name in BEST_KNOWN]
    first, second, last = _SENTENCES[language]
    return "\n".join(
        [
            first.format(version=transformers.__version__, types=len(rows)) + "\n",
            markdown.table([word(text) for text in ("kernel", "for", "served", "kept")], sums, right=2),
            second + "\n",
            markdown.table([word("model type"), *KERNELS], known, right=len(KERNELS)),
            last + "\n",
        ]
    )


def _name(model_type: str, row: Row, word: str) -> str:
    parts = ", ".join(f"`{part}`" for part in row.parts)
    return f"`{model_type}`" + (f" *{word}* {parts}" if parts else "")


@cache
def _rows() -> list[Row]:
    if transformers.__version__ != COUNTED:
        raise DocumentError(
            f"the documents are about transformers {COUNTED}, and {transformers.__version__} is installed: pip install "
            f"transformers=={COUNTED}, or bring kept.json up to date and name the new release in kinds.py"
        )
    return survey()
