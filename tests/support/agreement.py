"""Compare whole models with kernels with the CPU."""

from functools import partial

from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.catalogue import ATTENTION
from tests.support import attention_types, nearness, zoo


def assert_agrees(name: str, model: PreTrainedModel) -> float:
    """Compare a model of the zoo that is on the NPU with the same model on the CPU; returns the largest difference.

    Where the attention is ours the other one's is eager: transformers' sdpa takes masks that are added to scores for
    boolean ones wherever torch_npu is. Rows that see no key mean nothing, and are not compared.
    """
    reference, rows = zoo.build(name), {}
    if any(row.swapped and row.kind == ATTENTION.in_models for row in kernels_ext_npu.report(model)):
        reference.set_attn_implementation("eager")
        rows = attention_types.seen(reference, zoo.inputs(name, reference))
    return nearness.assert_same_model(name, model, reference, partial(attention_types.kept, rows=rows))
