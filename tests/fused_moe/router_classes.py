"""Make a small instance of a router class of transformers, call it, and compare what routers choose."""

import inspect

import torch
from torch import Tensor, nn

from tests.fused_moe.expert_modules import EXPERTS, HIDDEN, Config

GROUPS, TOP_GROUPS, TOP_K = 2, 1, 2


class RouterConfig(Config):
    """Answer what routers ask of a config beside what experts ask."""

    norm_topk_prob = True
    n_group, topk_group = GROUPS, TOP_GROUPS
    num_experts_per_tok = moe_topk = TOP_K
    routed_scaling_factor = router_scaling_factor = route_scale = 1.5
    output_multiplier = 0.5
    topk_method = "group_limited_greedy"
    expert_selection_fn = "softmax"
    scoring_func = "sigmoid"
    moe_norm_min = 1e-12
    zero_expert_num = 0


def instance(cls: type[nn.Module], **options: object) -> nn.Module:
    """Make one with random weights and a random bias; options are what the config says."""
    config = RouterConfig()
    for name, value in options.items():
        setattr(config, name, value)
    if cls.__name__ == "AXK2TopkRouter" and "n_group" not in options:
        config.n_group = None  # with groups it keeps its forward
    torch.manual_seed(0)
    router = cls(config)
    with torch.no_grad():
        for name, tensor in (*router.named_parameters(), *router.named_buffers()):
            tensor.normal_(0, 0.2 if "bias" in name else 1)
    return router


def call(router: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return logits ``[T, E]``, weights, and the experts; or the scores of all experts, and None, where it gives these.

    A router that is given its bias is given a fixed one.
    """
    names = list(inspect.signature(type(router).forward).parameters)[2:]
    bias = torch.linspace(-0.2, 0.2, EXPERTS, device=x.device)
    # Granite and Ernie take tokens, the others what a layer gives
    flat = type(router).__name__.startswith(("Granite", "Jamba", "Ernie", "Cohere", "Llama4"))
    found = router(x.reshape(-1, HIDDEN) if flat else x, *[bias] * len(names))
    return found if len(found) == 3 else (found[1], found[0], None)


def by_expert(weights: Tensor, experts: Tensor | None) -> Tensor:
    """Return the weight of each expert for each token, ``[T, E]``, zero for those that were not chosen.

    In which order the chosen ones come is the router's affair: transformers asks for no order.
    """
    if experts is None:
        return weights
    return weights.new_zeros(len(weights), EXPERTS).scatter(1, experts, weights)
