"""Whether transformers' plans of parallelism for a model, and its heads and experts, allow for so many ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from kernels_ext_npu.inspection.subject import CannotInspectError


def check(model: PreTrainedModel, tp: int, ep: int) -> None:
    """Check that a model can be sharded over so many ranks.

    Raises:
        CannotInspectError: it cannot. The message says why, and what can be.
    """
    name = type(model).__name__
    if tp > 1 and not model.tp_plan:
        raise CannotInspectError(f"--tp {tp}: {name} has no plan of tensor parallelism in transformers: use --fsdp")
    if ep > 1 and not model.ep_plan:
        raise CannotInspectError(
            f"--ep {ep}: {name} has no experts, or no plan to distribute them in transformers: use --fsdp or --tp"
        )
    if ep > 1 and "ep_dispatch_experts" not in model.ep_plan.values() and ep != tp:
        raise CannotInspectError(
            f"--ep {ep} --tp {tp}: {name} sums over the ranks of its experts, which have to be those of "
            f"tensor parallelism: give --tp {ep}, too"
        )
    _check_heads(model, tp)
    _check_experts(model, ep)


def _check_heads(model: PreTrainedModel, ranks: int) -> None:
    heads = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and _rule(path, model.tp_plan) == "colwise":
            width = getattr(model.get_submodule(path.rpartition(".")[0]), "head_dim", None)
            if isinstance(width, int) and re.search(r"\b[qkv]_proj$", path):
                heads[path] = module.out_features // width
    if any(number % ranks for number in heads.values()):
        path = next(path for path, number in heads.items() if number % ranks)
        raise CannotInspectError(
            f"--tp {ranks} does not divide the {heads[path]} heads of {path}: give one of "
            f"{_divisors(math.gcd(*heads.values()))}, and --fsdp for more ranks"
        )


def _check_experts(model: PreTrainedModel, ranks: int) -> None:
    for path, parameter in model.named_parameters():
        if _rule(path, model.ep_plan) == "grouped_gemm" and parameter.shape[0] % ranks:
            raise CannotInspectError(
                f"--ep {ranks} does not divide the {parameter.shape[0]} experts of {path}: give one of "
                f"{_divisors(parameter.shape[0])}"
            )


def _rule(path: str, plan: Mapping[str, str] | None) -> str | None:
    return (plan or {}).get(re.sub(r"\.\d+(?=\.|$)", ".*", path))


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
