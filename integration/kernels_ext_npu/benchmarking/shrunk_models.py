"""The models whose calls are measured: a layer of each kind, built with random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kernels_ext_npu import model_configs
from kernels_ext_npu.catalogue import ROUTERS
from kernels_ext_npu.environment import RefusedError, choices, first_line
from kernels_ext_npu.inspection import subject
from kernels_ext_npu.reporting.report import report

SEED = 0
VOCABULARY = 64  # words of a model that is measured call by call: no kernel computes its embedding
# what --shrink divides, to a multiple of 64: the operators want rows and halves of rows of whole 64 bytes
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
HEADS = (
    *("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"),
    *("num_heads", "mamba_n_heads", "mamba_num_heads"),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# how far a token stands from the centre that its experts share, and the logit of the experts of a centre
NOISE, LOGIT = 0.5, 3.0


@dataclass(frozen=True)
class Model:
    """A model to measure: its config with a layer of each kind and few words, and where its sizes come from."""

    name: str
    source: str
    config: PretrainedConfig
    vocabulary: int  # how many words it has as a whole

    def whole(self) -> Model:
        """Return the model with all its words."""
        config = copy.deepcopy(self.config)
        config.vocab_size = self.vocabulary
        return replace(self, config=config)

    def sizes(self) -> dict[str, int]:
        """Return the sizes in the config that decide how large a call is, by name."""
        names = (*WIDTHS, *HEADS, *EXPERTS, "head_dim", "num_experts_per_tok")
        values = {name: getattr(self.config, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None} | {"vocab_size": self.vocabulary}

    def build(self, dtype: torch.dtype) -> PreTrainedModel:
        """Build the model on the NPU with random weights, among which no two norms or experts are alike."""
        torch.manual_seed(SEED)
        try:
            with torch.device("npu"):
                model = AutoModelForCausalLM.from_config(copy.deepcopy(self.config), dtype=dtype)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RefusedError(
                f"{self.name}: no model for text can be built of its config: {first_line(error)}"
            ) from error
        model.config.architectures = [type(model).__name__]  # as in a checkpoint
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.min() == parameter.max():  # ones of a norm, zeros of a bias
                    parameter.add_(torch.rand_like(parameter) - 0.5)
        _set_routers(model)
        return model

    def hidden_states(self, batch: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Make ``[B, S, H]`` on the NPU: each token stands near one of the centres that the routers know."""
        torch.manual_seed(SEED + tokens)
        centres = _centres(self.config)
        chosen = torch.randint(len(centres), (batch, tokens), device="npu")
        noise = torch.randn(batch, tokens, centres.shape[1], device="npu")
        return (centres[chosen] + NOISE * noise).to(dtype)


def load(name: str, shrink: int) -> Model:
    """Return a model of the table, or of whatever `inspect` takes, with its sizes divided."""
    try:
        found = subject.find(name)
    except subject.CannotInspectError as error:
        if "/" in name:
            raise RefusedError(f"--model: {error}") from error
        raise RefusedError(f"--model {name}: {choices(name, model_configs.PUBLISHED)}. Of others: {error}") from error
    source = model_configs.source(name) if name in model_configs.PUBLISHED else "; ".join([name, *found.remarks])
    config = found.config.get_text_config(decoder=True)
    vocabulary = -(-getattr(config, "vocab_size", VOCABULARY) // shrink)  # one without cannot be built, and says so
    return Model(name, source, _reduce(config, shrink), vocabulary)


def _reduce(config: Any, shrink: int) -> PretrainedConfig:
    """Keep a layer of each kind and a small vocabulary, and divide the sizes.

    A head and the choices of a token stay what they are.
    """
    _keep_layers(config)
    config.vocab_size = VOCABULARY
    config.pad_token_id = None
    if shrink == 1:
        return config
    divisions: dict[str, Callable[[int], int]] = {
        **dict.fromkeys(WIDTHS, lambda size: -(-size // (64 * shrink)) * 64),
        **dict.fromkeys(HEADS, lambda heads: max(1, heads // shrink)),
        **dict.fromkeys(EXPERTS, lambda experts: min(experts, max(4 * _choices(config), experts // shrink))),
    }
    for name, value in config.to_dict().items():
        if name in divisions and isinstance(value, int):
            setattr(config, name, divisions[name](value))
    return config


def _keep_layers(config: Any) -> None:
    """Keep one layer of each kind, where lists in the config tell kinds.

    Where the config derives them, the layers up to the first of the last kind are kept.
    """
    count, dense = config.num_hidden_layers, getattr(config, "first_k_dense_replace", None)
    lists = {key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    lists = {key: value for key, value in lists.items() if len(set(map(str, value))) < count}  # no list of numbers
    derived = getattr(config, "layer_types", None) or ["one"] * count
    is_dense = [dense is not None and i < dense for i in range(count)]
    kinds = list(zip(*(map(str, value) for value in lists.values()), is_dense, derived))
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if len(derived) == count and "layer_types" not in vars(config):
        first = list(range(max(first) + 1)) if len(set(derived)) > 1 else first
    for name, value in lists.items():
        setattr(config, name, [value[i] for i in first])
    if dense:
        config.first_k_dense_replace = sum(i < dense for i in first)
    config.num_hidden_layers = len(first)


def _choices(config: Any) -> int:
    return getattr(config, "num_experts_per_tok", None) or 1


def _centres(config: Any) -> torch.Tensor:
    """Make ``[C, H]`` of ones and minus ones.

    There are as many centres as groups of experts that a token can choose.
    """
    experts = next((value for name in EXPERTS if (value := getattr(config, name, None))), 1)
    groups = max(1, experts // _choices(config))
    generator = torch.Generator().manual_seed(SEED)
    return (torch.randint(2, (groups, config.hidden_size), generator=generator) * 2.0 - 1).to("npu")


def _set_routers(model: PreTrainedModel) -> None:
    """Let a group of experts share a centre, so that no choice is a matter of the last bit.

    With random weights, one or two tokens in a hundred choose other experts in bfloat16 than in float32, and whoever
    rounds otherwise might seem wrong.
    """
    centres = _centres(model.config)
    for row in report(model):
        weight = getattr(model.get_submodule(row.path), "weight", None) if row.kind == ROUTERS.in_models else None
        if weight is None or weight.shape[1] != centres.shape[1]:
            continue
        choices = _choices(model.config)
        with torch.no_grad():
            weight.mul_(1e-3)
            for expert in range(len(centres) * choices):
                size = LOGIT * (1 + 0.05 * (expert % choices)) / centres.shape[1]
                weight[expert].add_(size * centres[expert // choices])
