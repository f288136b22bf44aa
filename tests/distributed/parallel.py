"""One module of transformers under one parallel style, with kernels on the devices, against the module on the CPU."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

import kernels_ext_npu
import softnpu
from tests.distributed import engines

# float32: sums in another order, of at most some hundred numbers of the size of 1; of larger ones a millionth
TOLERANCE = 1e-5


def mesh() -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("npu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A module with random parameters, the same on every rank; weights of 1 and biases of 0 would hide mistakes."""
    torch.manual_seed(0)
    module = build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return module


def leaves(inputs: tuple[Tensor, ...], device: str) -> list[Tensor]:
    """Inputs for one step: those of another one have its gradients."""
    return [x.detach().clone().to(device).requires_grad_(x.requires_grad) for x in inputs]


def results(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Outputs, gradients of inputs and parameters of a weighted sum of the outputs, by name; nothing is gathered."""
    outputs = [tensor for tensor in tree_leaves(module(*inputs)) if isinstance(tensor, Tensor)]
    found = {f"output {index}": tensor for index, tensor in enumerate(outputs)}
    loss: Any = 0.0
    for tensor in outputs:
        if tensor.is_floating_point() and tensor.requires_grad:
            weights = torch.linspace(-1, 1, tensor.numel()).reshape(tensor.shape).to(tensor.device)
            loss = loss + (tensor * weights).sum()
    loss.backward()
    found |= {f"input {index}": tensor.grad for index, tensor in enumerate(inputs) if tensor.requires_grad}
    return found | {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}


def compare(
    build: Callable[[], nn.Module],
    apply: Callable[[nn.Module], Any],
    inputs: tuple[Tensor, ...],
    before: bool = False,
    alone: bool = True,
) -> dict[str, Any]:
    """Return the largest differences between a module in parallel with kernels and one on the CPU without, by name.

    And the rows of the report, how often each operator was called, and collectives that are not those without kernels.
    Kernels are swapped in ``before`` the module becomes parallel, or afterwards. What is not compared ``alone`` is
    compared with the module in parallel without kernels, for what says itself that one device computes something else.
    """
    original = seeded(build)
    module = copy.deepcopy(original).to("npu")
    with engines.registered(True):
        if before:
            kernels_ext_npu.kernelize(module)
        apply(module)
        for _ in range(2):  # once more, as train() and eval() of a model do
            kernels_ext_npu.kernelize(module)
        plain = copy.deepcopy(original).to("npu")
        apply(plain)
        softnpu.reset_counters()
        expected = results(plain, *leaves(inputs, "npu"))
        sent = softnpu.collectives()
        if alone:
            expected = results(original, *leaves(inputs, "cpu"))
        softnpu.reset_counters()
        found = results(module, *leaves(inputs, "npu"))
        calls = {name: number for name, number in softnpu.counters().items() if name.startswith("npu_")}
        added = {group: traffic for group, traffic in softnpu.collectives().items() if sent.get(group) != traffic}
        rows = {row.path: [row.swapped, row.reason] for row in kernels_ext_npu.report(module)}
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    differences = {name: largest_difference(found[name], truth) / unit(truth) for name, truth in expected.items()}
    return {"differences": differences, "rows": rows, "calls": calls, "added": added}


def largest_difference(found: Tensor | None, expected: Tensor | None) -> float:
    """Infinite where one is missing or has another shape."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    found, expected = engines.whole(found), engines.whole(expected)
    if found.shape != expected.shape or found.isnan().any():
        return float("inf")
    return (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0


def unit(expected: Tensor | None) -> float:
    """A tenth of the largest number that is expected, and at least 1: 1e-5 of it are eight roundings of float32."""
    return 1.0 if expected is None or not expected.numel() else max(1.0, expected.detach().abs().max().item() / 10)


def assert_right(outcomes: list[Mapping[str, Any]]) -> None:
    """On every rank."""
    for rank, outcome in enumerate(outcomes):
        wrong = {name: value for name, value in outcome["differences"].items() if not value < TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"
