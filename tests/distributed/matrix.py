"""What is trained on several devices: engine by engine, model by model, with and without activation checkpointing."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import ROUND_UP, Context
from pathlib import Path

RECORD = Path(__file__).resolve().parents[1] / "data" / "same_numbers.json"
RECORDS = bool(os.environ.get("UPDATE"))  # whether this run writes the record, so that the old one says nothing

TOLERANCE = 1e-5  # float32: losses are about 5, the largest gradient of each parameter between 0.01 and 0.8

# bfloat16 is compared with float32 by the length of what is wrong, in parts of the length of what is right. Kernels
# may be this much further away than the same model without them: either rounds, but not at the same places.
MORE = 1.25
MORE_OF_ONE = 2.0  # of a single parameter, where the chance of a few roundings counts more
# For both, in units of the rounding of bfloat16, 2⁻⁸: losses are means, in which roundings cancel; gradients pass
# through some hundred of them; a step moves weights by about a hundredth of what they are.
TOLERANCES_BFLOAT16 = {"loss": 1 * 2**-8, "gradients": 16 * 2**-8, "weights": 1 * 2**-8}

# A difference that was recorded on one machine is another one where products add up in another order: up to three
# times with SSE 4.1 in place of AVX-512. Losses of about 5 differ by whole roundings, of 2⁻²¹. What is recorded is
# rounded up to one digit, to twice itself at most.
AS_RECORDED = 3.0
ROUNDING = 2**-21

DENSE = ("Qwen3", "Llama", "Gemma 3")
MIXTURES = ("Qwen3-MoE", "gpt-oss")
LINEAR = ("Qwen3-Next", "Qwen3.5", "Kimi Linear")
CHECKPOINTING = ("off", "non-reentrant", "reentrant")

ATTENTION = {"npu_rms_norm", "npu_rotary_mul"}
GROUPED = {"npu_moe_token_permute", "npu_grouped_matmul"}
# what the forward of each model has to call
FUSED = {
    "Qwen3": ATTENTION | {"npu_swiglu"},
    "Llama": ATTENTION | {"npu_swiglu"},
    "Gemma 3": ATTENTION | {"npu_geglu"},
    "Qwen3-MoE": ATTENTION | GROUPED | {"npu_swiglu"},
    "gpt-oss": ATTENTION | GROUPED | {"npu_clipped_swiglu"},
    "Qwen3-Next": ATTENTION | GROUPED | {"npu_swiglu"},
    "Qwen3.5": ATTENTION | {"npu_swiglu"},
    "Kimi Linear": GROUPED | {"npu_rms_norm", "npu_swiglu"},
}


@dataclass(frozen=True)
class Setup:
    """Where an engine is tested: on how many processes, with which models and backend, and whether in bfloat16."""

    ranks: int
    models: tuple[str, ...] = DENSE + MIXTURES
    backend: str = "hccl"
    is_bfloat16: bool = False


ENGINES = {
    "DDP": Setup(2),
    "FSDP2": Setup(2, DENSE + MIXTURES + LINEAR),
    "FSDP2, by transformers": Setup(2),
    "FSDP2, bfloat16": Setup(2, is_bfloat16=True),
    "FSDP1": Setup(2),
    "FSDP1, flat": Setup(2),
    "TP": Setup(2, DENSE + MIXTURES + LINEAR),
    "EP, dispatch": Setup(2, MIXTURES),
    "EP, router masking": Setup(2, MIXTURES),
    "FSDP2, offload": Setup(2, backend="cpu:gloo,npu:hccl"),
    "FSDP1, offload": Setup(2, ("Qwen3", "gpt-oss")),
    "FSDP2, hybrid": Setup(4),
    "TP × FSDP2": Setup(4),
    "EP × FSDP2": Setup(4, MIXTURES),
}


@dataclass(frozen=True)
class Row:
    """The largest differences from one process, in bfloat16 relative ones."""

    engine: str
    model: str
    checkpointing: str
    loss: float
    gradients: float
    weights: float

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is about."""
        return self.engine, self.model, self.checkpointing


def checkpointings(engine: str, model: str) -> tuple[str, ...]:
    """Reentrant for one model of each engine on two processes: it differs in how autograd is called, not in kernels."""
    setup = ENGINES[engine]
    return CHECKPOINTING if setup.ranks == 2 and model == setup.models[0] else CHECKPOINTING[:2]


def is_counted(engine: str, model: str) -> bool:
    """Whether it is run without kernels, too: four processes take longer, and there two models have to do."""
    return ENGINES[engine].ranks == 2 or model in ("Qwen3", "Qwen3-MoE")


def pairs() -> list[tuple[str, str]]:
    """All engines with their models."""
    return [(engine, model) for engine, setup in ENGINES.items() for model in setup.models]


def keys() -> Iterator[tuple[str, str, str]]:
    """What there has to be a row for."""
    for engine, model in pairs():
        for checkpointing in checkpointings(engine, model):
            yield engine, model, checkpointing


def read() -> dict[tuple[str, str, str], Row]:
    """What was recorded."""
    rows = [Row(**row) for row in json.loads(RECORD.read_text("utf-8"))] if RECORD.is_file() else []
    return {row.key: row for row in rows}


def assert_as_recorded(row: Row) -> None:
    """Raise where what was measured just now is not what the documents say, neither much more nor much less."""
    recorded = read()[row.key]
    for kind in ("loss", "gradients", "weights"):
        found, said = (max(getattr(one, kind), ROUNDING) for one in (row, recorded))
        message = f"{kind} differ by {found:.1e}, docs/parallel.md says {said:.0e}: UPDATE=1 make test-distributed"
        assert said / (2 * AS_RECORDED) <= found <= said * AS_RECORDED, f"{row.key}: {message}"


def write(rows: dict[tuple[str, str, str], Row]) -> None:
    """Record rows in the order of the matrix, rounded up to one digit: the second differs from machine to machine."""
    lines = []
    for key in keys():
        if key in rows:
            row = asdict(rows[key])
            lines.append(row | {kind: _rounded_up(row[kind]) for kind in ("loss", "gradients", "weights")})
    RECORD.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n", "utf-8")


def _rounded_up(value: float) -> float:
    return float(Context(prec=1, rounding=ROUND_UP).create_decimal(repr(value)))
