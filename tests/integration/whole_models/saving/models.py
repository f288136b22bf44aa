"""Models of one layer, with and without kernels, with weights to be saved and with others to be loaded over."""

import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import kernels_ext_npu
from tests.support import zoo

IDS = torch.randint(2, 64, (2, 7), generator=torch.Generator().manual_seed(0))
# gate and up are packed, or there are experts; an adapter stands beside them
ARCHITECTURES = {"dense": "llama", "experts": "qwen3_moe", "adapted": "llama"}


def adapter_config() -> LoraConfig:
    return LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)


def make(kind: str, *, device: str = "cpu", kernels: bool = False, saved: bool = True) -> nn.Module:
    """Make a model with the weights that are to be saved, or with all of them different."""
    model: nn.Module = zoo.build(ARCHITECTURES[kind], num_hidden_layers=1)
    torch.manual_seed(0)  # of adapters
    if kind == "adapted":
        model = get_peft_model(model, adapter_config()).eval()
    model.to(device)
    with torch.no_grad():
        for parameter in () if saved else model.parameters():
            parameter.add_(1)
    return kernels_ext_npu.kernelize(model) if kernels else model


def has_kernels(model: nn.Module) -> bool:
    return any(row.swapped for row in kernels_ext_npu.report(model))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies on the host of what a model holds."""
    return on_host(model.state_dict())


def on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS.to(next(model.parameters()).device), use_cache=False).logits.cpu()


def report(model: nn.Module) -> list[kernels_ext_npu.Row]:
    return copy.deepcopy(list(kernels_ext_npu.report(model)))


def layout(model: nn.Module) -> dict[str, tuple]:
    """Return where each weight lies, and how."""
    return {name: (p.data_ptr(), p.stride(), p.untyped_storage().nbytes()) for name, p in model.named_parameters()}
