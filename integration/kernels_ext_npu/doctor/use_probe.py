"""A probe that does what a user does: swaps the kernels into a tiny model on the NPU, runs it, and compares."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kernels_ext_npu.doctor.probe import note, step

SOFTNPU, TORCH_NPU, DEVICE = "import softnpu", "import torch_npu", "adding two numbers on the NPU"
KERNELS, TRANSFORMERS = "import kernels", "import transformers"
MODEL, REGISTER, SWAP = "running a tiny model without kernels", "register()", "swapping kernels into it"
RUN, UNREGISTER = "running it with kernels", "unregister()"

# one dense layer and one with experts, so that every repository is used
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}


def probe(source: str | None) -> None:
    """Swap the kernels into a tiny model on the NPU, and compare what it computes with the CPU.

    Args:
        source: where the kernels come from, as register() takes it; without one the probe stops before it needs them.
    """
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    step(SOFTNPU)
    import softnpu  # before torch; changes nothing where there is a card

    note(software=softnpu.is_software())
    step(TORCH_NPU)
    import torch
    import torch_npu

    step(DEVICE)
    note(device=torch_npu.npu.get_device_name(0), total=(torch.ones(1, device="npu") + 1).item())
    step(KERNELS)
    import kernels

    step(TRANSFORMERS)
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import kernels_ext_npu

    if source is None:
        return
    step(MODEL)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        model.to("npu")
        step(REGISTER)
        kernels_ext_npu.register(source=source)
        step(SWAP)
        model.set_use_kernels(True)
        report = kernels_ext_npu.report(model)
        note(
            rows=len(report), kept=[f"{row.path} ({row.class_name}): {row.reason}" for row in report if not row.swapped]
        )
        note(summary=report.summary())
        step(RUN)
        found = model(input_ids=tokens.to("npu")).logits.cpu()
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    note(difference=difference, agrees=difference <= _tolerance(softnpu.is_software()))  # a NaN does not agree
    note(taken=_taken(kernels.get_loaded_kernels()))
    step(UNREGISTER)
    kernels_ext_npu.restore(model)
    kernels_ext_npu.unregister()


def _tolerance(software: bool) -> float:
    """Return how far logits may be apart, relative to the largest: sums are in another order.

    A real device may multiply float32 matrices in less precision.
    """
    return 1e-5 if software else 1e-2


def _taken(loaded: list[Any]) -> dict[str, str]:
    """Return the folder of the variant that was really loaded of each kernel, by the kernel's name."""
    return {kernel.metadata.name.python_name: str(Path(kernel.module.__file__).parent) for kernel in loaded}
