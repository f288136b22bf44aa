"""Acts of training: steps of optimizers, with gradients that were made in one way or another."""

from collections.abc import Callable
from functools import partial
from random import Random

import torch

from tests.support.programs.registry import act
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
    backward(side)
    step(side)


@act(can_train, computes=True)
def step_with_accumulated_and_clipped_gradients(side: Side, choice: Random) -> None:
    backward(side, 2)
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


# an epsilon that keeps the quotient of two roundings from being a gradient: AdamW divides by a root of squares
WAYS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=RATE, eps=1e-2, foreach=False),
    "AdamW, all at once": partial(torch.optim.AdamW, lr=RATE, eps=1e-2, foreach=True),
    "SGD with momentum": partial(torch.optim.SGD, lr=RATE, momentum=0.9, foreach=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=RATE, eps=(1e-2, 1e-3)),
}


@act(can_train, computes=True)
def step_with_another_optimizer(side: Side, choice: Random) -> None:
    optimizer = WAYS[choice.choice(sorted(WAYS))](trained(side))
    for _ in range(2):
        backward(side)
        optimizer.step()
    side.model.zero_grad()


@act(can_train)
def keep_an_optimizer(side: Side, choice: Random) -> None:
    side.held["optimizer"] = WAYS[choice.choice(sorted(WAYS))](trained(side))


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
