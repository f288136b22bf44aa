"""What tests/distributed/test_compiling.py runs on its processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import kernels_ext_npu
from tests.support import zoo
from tests.support.agreement import TOLERANCE


def _batch(name: str, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    return zoo.inputs(name, model, batch=2, length=9, seed=seed)


def _loss(logits: Tensor) -> Tensor:
    return logits.float().square().mean()


def _reference(name: str, seeds: tuple[int, ...] = (0,)) -> tuple[nn.Module, Tensor]:
    """One process without kernels on the whole batches; gradients add up."""
    model = zoo.build(name).train()
    for seed in seeds:
        loss = _loss(model(**_batch(name, model, seed), use_cache=False).logits)
        loss.backward()
    return model, loss.detach()


def _mine(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    rank = dist.get_rank()
    return {key: value[rank : rank + 1].npu() for key, value in inputs.items()}


def _kernelized(name: str) -> nn.Module:
    torch._dynamo.reset()
    return kernels_ext_npu.kernelize(zoo.build(name).npu()).train()


def _compare(model: nn.Module, reference: nn.Module, tolerance: float = TOLERANCE) -> float:
    """The largest distance of a gradient, of the norm of all; raises beyond the tolerance."""
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    worst = 0.0
    for name, parameter in model.named_parameters():
        name = name.replace("_orig_mod.", "").replace("module.", "")
        found = parameter.grad
        assert (found is not None) == (name in expected), name
        if found is not None:
            found = found.full_tensor() if isinstance(found, DTensor) else found
            distance = ((found.cpu() - expected[name]).norm() / whole).item()
            assert distance <= tolerance, (name, distance)
            worst = max(worst, distance)
    return worst


def sharded(name: str, compile_layers: bool, checkpoint: bool | None = None, accumulate: bool = False) -> float:
    """FSDP2, each layer compiled by itself; gradients of both processes against one."""
    seeds = (0, 1) if accumulate else (0,)
    reference, _ = _reference(name, seeds)
    model = _kernelized(name)
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
    for layer in model.model.layers:
        if compile_layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer)
    fully_shard(model)
    for seed in seeds:
        model.set_requires_gradient_sync(seed == seeds[-1])
        _loss(model(**_mine(_batch(name, model, seed)), use_cache=False).logits).backward()
    return _compare(model, reference)


def replicated(name: str, compile_model: bool, accumulate: bool = False) -> float:
    """DDP, compiled; with accumulation the first batch is not reduced."""
    seeds = (0, 1) if accumulate else (0,)
    reference, _ = _reference(name, seeds)
    model = _kernelized(name)
    wrapped = DistributedDataParallel(model, device_ids=[dist.get_rank()])
    call = torch.compile(wrapped, backend="aot_eager") if compile_model else wrapped
    for seed in seeds:
        inputs = _mine(_batch(name, model, seed))
        if seed == seeds[-1]:
            _loss(call(**inputs, use_cache=False).logits).backward()
        else:
            with wrapped.no_sync():
                _loss(call(**inputs, use_cache=False).logits).backward()
    return _compare(model, reference)


def sharded_in_bfloat16(name: str) -> tuple[float, float]:
    """The policy of FSDP2: how far gradients are from float32, with kernels and without."""
    reference, _ = _reference(name)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    distances = []
    for kernels in (True, False):
        model = zoo.build(name).npu().train()
        if kernels:
            kernels_ext_npu.kernelize(model)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        _loss(model(**_mine(_batch(name, model)), use_cache=False).logits).backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        distances.append(_compare(model, reference, 1.0))
        if kernels:
            kernels_ext_npu.unregister()
    return distances[0], distances[1]


def tensor_parallel(folder: str, name: str, train: bool) -> float:
    """transformers' own tensor parallelism, each layer compiled; every process has the whole batch."""
    from transformers import AutoModelForCausalLM, DistributedConfig

    torch._dynamo.reset()
    kernels_ext_npu.register()
    reference, _ = _reference(name)
    config = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)
    kernels_ext_npu.kernelize(model.train())
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    inputs = {key: value.npu() for key, value in _batch(name, model).items()}
    with torch.set_grad_enabled(train):
        logits = model(**inputs, use_cache=False).logits
    if train:
        _loss(logits).backward()
    expected = reference(**_batch(name, reference), use_cache=False).logits
    assert (logits.detach().cpu() - expected).norm() <= TOLERANCE * expected.norm()
    return _compare(model, reference) if train else 0.0
