"""Acts of training: steps of optimizers, with gradients that were made in one way or another, and adapters."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side

RATE = 2e-3


def can_train(side: Side) -> bool:
    """Tell whether there is anything to train."""
    return any(p.requires_grad for p in side.model.parameters())


def backward(side: Side, times: int = 1) -> None:
    """Make the gradients of some calls, from nothing."""
    side.model.zero_grad()
    for _ in range(times):
        side.run().loss.backward()


def trained(side: Side) -> list:
    """Return what takes a gradient."""
    return [p for p in side.model.parameters() if p.requires_grad]


def step(side: Side) -> None:
    """Take a step of SGD by the gradients that are there, and drop them."""
    torch.optim.SGD(trained(side), lr=RATE).step()
    side.model.zero_grad()


@act(can_train, computes=True)
def step_with_sgd(side: Side, choice: Random) -> None:
    """With gradients of one call, or of two that are clipped."""
    calls = choice.choice([1, 2])
    backward(side, calls)
    if calls == 2:
        torch.nn.utils.clip_grad_norm_(trained(side), 0.5)
    step(side)


@act(can_train, computes=True)
def step_between_backwards(side: Side, choice: Random) -> None:
    """Two calls, two backwards, the later one first."""
    side.model.zero_grad()
    first, second = side.run().loss, side.run().loss
    second.backward()
    first.backward()
    step(side)


@act(can_train, computes=True)
def step_with_a_selective_checkpoint(side: Side, choice: Random) -> None:
    """Everything up to the loss is computed twice, but for products."""
    side.model.zero_grad()
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    checkpoint(lambda: side.run().loss, use_reentrant=False, context_fn=contexts).backward()
    step(side)


# an epsilon that keeps the quotient of two roundings from being a gradient: AdamW divides by a root of squares
WAYS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=RATE, eps=1e-2, foreach=False),
    "AdamW, all at once": partial(torch.optim.AdamW, lr=RATE, eps=1e-2, foreach=True),
    "SGD with momentum": partial(torch.optim.SGD, lr=RATE, momentum=0.9, foreach=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=RATE, eps=(1e-2, 1e-3)),
}


acts(
    can_train,
    keep_an_optimizer=lambda side, choice: side.held.update(optimizer=WAYS[choice.choice(sorted(WAYS))](trained(side))),
)


@act(lambda side: can_train(side) and "optimizer" in side.held, computes=True)
def step_with_the_kept_optimizer(side: Side, choice: Random) -> None:
    """It may have been made before kernels came, or for parameters that are gone; or it is loaded anew first."""
    optimizer = side.held["optimizer"]
    if choice.random() < 0.5:
        optimizer.load_state_dict(optimizer.state_dict())
    backward(side)
    optimizer.step()
    side.model.zero_grad()


@act(can_train)
def leave_gradients(side: Side, choice: Random) -> None:
    """Compare the gradients that stand in parameters, relative to all of them, and let them stand."""
    backward(side)
    gradients = [p.grad for _, p in side.parameters() if p.grad is not None]
    side.show_gradient(torch.cat([gradient.detach().cpu().double().flatten() for gradient in gradients]))


# ---- frameworks: steps by weights that are perturbed -----------------------------------------------------------------
@act(can_train, computes=True)
def step_by_sam(side: Side, choice: Random) -> None:
    """By the gradient at weights that were moved uphill, and put back; the first outputs are still held."""
    parameters = trained(side)
    side.model.zero_grad()
    first = side.run()
    first.loss.backward()
    before = [p.data.clone() for p in parameters]
    moved = [p for p in parameters if p.grad is not None]
    norm = torch.stack([p.grad.float().norm() for p in moved]).norm().clamp(min=1e-12)
    for parameter in moved:
        parameter.data.add_((parameter.grad * (0.0625 / norm)).to(parameter.dtype))
    backward(side)
    for parameter, data in zip(parameters, before):
        parameter.data = data if choice.random() < 0.5 else parameter.data.copy_(data)
    step(side)
    side.show(first.logits)


@act(can_train)
def step_by_mezo(side: Side, choice: Random) -> None:
    """By two losses without gradients at weights moved forth and back; the step is of one size for both sides."""
    seed, held = choice.randrange(2**16), []

    def move(by: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in trained(side):
            parameter.data.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=by)

    for by in (2.0**-6, -(2.0**-5)):
        move(by)
        with torch.no_grad():
            held.append(side.run())
    move(2.0**-6 + RATE)
    for result in held:
        side.show(result.loss)
        side.show(result.logits)


# ---- LoRA by peft, one or two, on, off, merged and taken away --------------------------------------------------------
def _targets(side: Side) -> list[str]:
    """Return the last names of linear layers that nothing else has: a number is the name of blocks, too."""
    linear = {path.rpartition(".")[2] for path, _ in side.named("Linear")} - {"lm_head", "embed_out", "base_layer"}
    others = {path.rpartition(".")[2] for path, module in side.named("") if not isinstance(module, nn.Linear)}
    return sorted(name for name in linear - others if not name.isdigit())


def _draw(side: Side) -> None:
    """Draw weights of adapters on the host: half of them would be zero, and each device draws others."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)


def _adapters(side: Side) -> list[str]:
    model: Any = side.model
    return sorted(model.peft_config) if side.is_adapted else []


@act(lambda side: not side.is_adapted and bool(_targets(side)))
def add_an_adapter(side: Side, choice: Random) -> None:
    targets = _targets(side)
    chosen = choice.sample(targets, min(3, len(targets)))
    side.model = get_peft_model(side.model, LoraConfig(r=2, target_modules=chosen, lora_alpha=4))
    _draw(side)


@act(lambda side: side.is_adapted)
def add_or_delete_another_adapter(side: Side, choice: Random) -> None:
    model: Any = side.model
    if len(_adapters(side)) == 1:
        model.add_adapter("other", model.peft_config["default"])
        _draw(side)
    else:
        model.set_adapter("default")
        model.delete_adapter("other")


acts(
    lambda side: side.is_adapted,
    switch_the_adapter_off=lambda side, choice: side.model.base_model.disable_adapter_layers(),
    switch_the_adapter_on=lambda side, choice: side.model.base_model.enable_adapter_layers(),
    choose_an_adapter=lambda side, choice: side.model.set_adapter(choice.choice(_adapters(side))),
    merge_the_adapter=lambda side, choice: side.model.merge_adapter(),
    unmerge_the_adapter=lambda side, choice: side.model.unmerge_adapter(),
    unload_the_adapter=lambda side, choice: side.model.unload(),
)
acts(lambda side: side.is_adapted, computes=True, merge_and_unload=lambda side, choice: side.model.merge_and_unload())
