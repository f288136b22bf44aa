"""What tests/distributed/test_compiling.py runs on its processes: models there against one process without kernels."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, DistributedConfig

import kernels_ext_npu
import softnpu
from tests.distributed import engines
from tests.support import zoo

compiled = partial(torch.compile, backend="aot_eager")
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Difference:
    """How far one process is from the truth.

    Attributes:
        gradients: of each parameter the length of what is wrong, in parts of the length of all gradients; infinity
            where only one side has a gradient.
        calls: what the device was asked for.
        logits: the length of what is wrong in the logits, in parts of their length; 0 where they were not compared.
    """

    gradients: dict[str, float]
    calls: Counter[str]
    logits: float = 0.0


def reference(name: str, seeds: tuple[int, ...] = (0,)) -> nn.Module:
    """Train a model on the CPU, in one process and without kernels, on the whole batches; gradients add up."""
    model = zoo.build(name).train()
    for seed in seeds:
        _loss(model(**_batch(name, model, seed), use_cache=False).logits).backward()
    return model


def sharded(
    name: str, compile_layers: bool = False, checkpoint: bool | None = None, accumulate: bool = False, **options: Any
) -> Difference:
    """Train a model under FSDP2, each layer compiled by itself."""

    def shard(model: Any) -> Any:
        if checkpoint is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
        for layer in model.model.layers:
            if compile_layers:
                layer.compile(backend="aot_eager", fullgraph=True)
            fully_shard(layer, **({"mp_policy": BFLOAT16} if options else {}))
        return fully_shard(model, **({"mp_policy": BFLOAT16} if options else {}))

    return _trained(name, shard, accumulate, **options)


def sharded_in_bfloat16(name: str, kernels: bool) -> Difference:
    """Train a model under the bfloat16 policy of FSDP2, with kernels or without; the truth is float32."""
    return sharded(name, kernels=kernels)


def replicated(name: str, compile_model: bool = False, accumulate: bool = False) -> Difference:
    """Train a model under DDP, compiled; with accumulation the first batch is not reduced."""

    def replicate(model: nn.Module) -> Any:
        wrapped = DistributedDataParallel(model, device_ids=[dist.get_rank()])
        return compiled(wrapped) if compile_model else wrapped

    return _trained(name, replicate, accumulate)


def tensor_parallel(folder: str, name: str, train: bool) -> Difference:
    """Run a model under transformers' own tensor parallelism, each layer compiled; each process has the whole batch."""
    torch._dynamo.reset()
    truth = reference(name)
    expected = truth(**_batch(name, truth), use_cache=False).logits.detach()
    with engines.registered(True):
        config = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)
        kernels_ext_npu.kernelize(model.train())
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        inputs = {key: value.npu() for key, value in _batch(name, model).items()}
        softnpu.reset_counters()
        with torch.set_grad_enabled(train):
            logits = model(**inputs, use_cache=False).logits
        if train:
            _loss(logits).backward()
        calls = Counter(softnpu.counters())
    difference = ((logits.detach().cpu() - expected).norm() / expected.norm()).item()
    return Difference(_differences(model, truth) if train else {}, calls, difference)


def _trained(name: str, wrap: Callable[[nn.Module], Any], accumulate: bool, kernels: bool = True) -> Difference:
    """Train a model, each process with its row of a batch, or of two whose gradients are reduced with the last."""
    torch._dynamo.reset()
    seeds = (0, 1) if accumulate else (0,)
    truth = reference(name, seeds)
    with engines.registered(kernels):
        model = zoo.build(name).npu()
        call = wrap((kernels_ext_npu.kernelize(model) if kernels else model).train())
        softnpu.reset_counters()
        for seed in seeds:
            inputs = {key: value.chunk(2)[dist.get_rank()].npu() for key, value in _batch(name, model, seed).items()}
            is_last = seed == seeds[-1]
            if hasattr(call, "set_requires_gradient_sync"):
                call.set_requires_gradient_sync(is_last)
            with call.no_sync() if hasattr(call, "no_sync") and not is_last else nullcontext():
                _loss(call(**inputs, use_cache=False).logits).backward()
        calls = Counter(softnpu.counters())
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    return Difference(_differences(model, truth), calls)


def _batch(name: str, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    return zoo.inputs(name, model, batch=2, length=9, seed=seed)


def _loss(logits: Tensor) -> Tensor:
    return logits.float().square().mean()


def _differences(model: nn.Module, truth: nn.Module) -> dict[str, float]:
    expected = {name: p.grad for name, p in truth.named_parameters() if p.grad is not None}
    found = {name.replace("_orig_mod.", ""): gradient for name, gradient in engines.gradients(model).items()}
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    differences = dict.fromkeys(found.keys() | expected.keys(), float("inf"))
    for name in found.keys() & expected.keys():
        differences[name] = ((found[name] - expected[name]).norm() / whole).item()
    return differences
