"""Autocast: modules give the dtypes that they give without kernels, and are no further from float32."""

import pytest
import torch
from torch import Tensor, nn

from tests.support import zoo
from tests.support.served import kernelized

SLACK = 1.4  # both round, in part at other places: up to 1.2 between the models here


def run(model: nn.Module, name: str, dtype: torch.dtype | None) -> tuple[Tensor, dict[str, torch.dtype], list[Tensor]]:
    """Logits, dtypes of what modules return, gradients."""
    dtypes: dict[str, torch.dtype] = {}

    def note(path: str) -> None:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if path.endswith("self_attn"):
                output = output[:1]  # behind it are the weights, which eager attention returns and the kernel has not
            for number, tensor in enumerate(zoo.tensors(output)):
                dtypes[f"{path}[{number}]"] = tensor.dtype

        hooks.append(model.get_submodule(path).register_forward_hook(hook))

    hooks: list = []
    for path, _ in model.named_modules():
        # a hook of a projection, or of an activation, would end what the kernels do
        if "norm" in path or path.endswith(("mlp", "self_attn", "experts", "gate", "rotary_emb", "lm_head")):
            note(path)
    with torch.autocast(model.device.type, dtype=dtype, enabled=dtype is not None):
        logits = zoo.logits(name, model, use_cache=False)
    logits.float().square().mean().backward()
    for hook in hooks:
        hook.remove()
    return logits.detach().cpu(), dtypes, [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    apart = torch.stack([(a - b).norm() for a, b in zip(found, expected, strict=True)]).norm()
    return (apart / torch.stack([b.norm() for b in expected]).norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_dtypes_are_the_originals_and_values_as_near(name: str, dtype: torch.dtype) -> None:
    logits, _, gradients = run(zoo.build(name), name, None)
    without, dtypes, gradients_without = run(zoo.build(name).to("npu"), name, dtype)
    found, found_dtypes, found_gradients = run(kernelized(name), name, dtype)
    assert found_dtypes == dtypes
    assert found.dtype == without.dtype == dtype
    assert distance([found.float()], [logits]) <= SLACK * distance([without.float()], [logits])
    assert distance(found_gradients, gradients) <= SLACK * distance(gradients_without, gradients)
