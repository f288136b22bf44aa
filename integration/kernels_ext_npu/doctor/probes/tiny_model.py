"""A probe that does what a user does: swaps the kernels into a tiny model on the NPU, runs it, and compares."""

from __future__ import annotations

import os
from pathlib import Path

from kernels_ext_npu.doctor.probes.imports import KERNELS, TORCH_NPU, TRANSFORMERS
from kernels_ext_npu.machine.processes import say

SOFTNPU, DEVICE = "import softnpu", "adding two numbers on the NPU"


def swapped_and_compared(source: str | None) -> None:
    """Swap the kernels into a tiny model on the NPU, and compare what it computes with the CPU.

    Args:
        source: where the kernels come from, as register() takes it; without one the probe stops before it needs them.
    """
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    say(step=SOFTNPU)
    import softnpu  # before torch; changes nothing where there is a card

    say(software=softnpu.is_software())
    say(step=TORCH_NPU)
    import torch
    import torch_npu

    say(step=DEVICE)
    say(device=torch_npu.npu.get_device_name(0), total=(torch.ones(1, device="npu") + 1).item())
    say(step=KERNELS)
    import kernels

    say(step=TRANSFORMERS)
    from transformers import Qwen3MoeForCausalLM

    import kernels_ext_npu
    from kernels_ext_npu import model_configs
    from kernels_ext_npu.measuring import distance

    if source is None:
        return
    say(step="running a tiny model without kernels")
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(model_configs.config(model_configs.DENSE_AND_EXPERTS)).eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        model.to("npu")
        say(step="register()")
        kernels_ext_npu.register(source=source)
        say(step="swapping kernels into it")
        model.set_use_kernels(True)
        report = kernels_ext_npu.report(model)
        kept = [f"{row.path} ({row.class_name}): {row.reason}" for row in report if not row.swapped]
        say(rows=len(report), kept=kept, summary=report.summary())
        say(step="running it with kernels")
        found = model(input_ids=tokens.to("npu")).logits
    difference = distance.distance(found, expected).largest
    say(difference=difference, agrees=distance.models_agree(difference))
    loaded = kernels.get_loaded_kernels()
    say(taken={kernel.metadata.name.python_name: str(Path(str(kernel.module.__file__)).parent) for kernel in loaded})
    say(step="unregister()")
    kernels_ext_npu.restore(model)
    kernels_ext_npu.unregister()
