"""Count on fake tensors what a forward and backward of a model costs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.inspection import subject
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.phases import count
from kernels_ext_npu.inspection.subject import Subject
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.roofline import SOCS

SOC = SOCS["910b3"]


def fake_model(model_type: str, **sizes: int) -> PreTrainedModel:
    """Make a bfloat16 model on the NPU that takes no memory; inside a FakeTensorMode."""
    with torch.device("npu"):
        config = AutoConfig.for_model(model_type, dtype="bfloat16", **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def costs(prepare, model_type: str, tokens: int, **sizes: int) -> tuple[Cost, Cost]:
    """Count a forward without gradients, and a forward and backward, of a model that was prepared."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(model_type, **sizes)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="npu")
        prepare(model.eval())
        with torch.no_grad(), Cost() as forward:
            model(ids, use_cache=False)
        prepare(model.train())
        with Cost() as training:
            model(ids, use_cache=False).logits.sum().backward()
    return forward, training


@contextmanager
def published(
    name: str | Subject,
    tokens: int = 4096,
    prepare: Callable[[PreTrainedModel], object] = kernels_ext_npu.kernelize,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[PreTrainedModel, Callable[..., Counts]]]:
    """Build a model, by its name a published one, on fake tensors, prepared, for rows of tokens.

    Yields it, and what counts a phase of it, such as "forward" or "step", by `count` or by what is given in its place.
    """
    values, found = KnownValues(), subject.find(name) if isinstance(name, str) else name
    with FakeTensorMode(allow_non_fake_inputs=True):
        with Counting(values, SOC):
            model = subject.build(found, dtype)
        prepare(model)
        inputs, _ = subject.make_inputs(model, batch, tokens, values)
        labelled = inputs | subject.labels(model, inputs)

        def counted(phase: str, counting: Callable[..., Counts] = count) -> Counts:
            return counting(phase, model, labelled if phase == "step" else inputs, values, SOC)

        yield model, counted
