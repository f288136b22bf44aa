"""Run torch's operator database on two devices: samples, copies on the device, comparison."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.testing import assert_close
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

SAMPLES = 12
FLOATING = (torch.float32, torch.bfloat16)
OTHERS = (torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn)


def operator_id(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def dtypes(op: OpInfo) -> list[torch.dtype]:
    """Choose float32 and bfloat16; for an operator that takes neither, one that it takes."""
    return [d for d in FLOATING if d in op.dtypes] or [d for d in OTHERS if d in op.dtypes][:1]


def samples(op: OpInfo, dtype: torch.dtype, requires_grad: bool = False) -> Iterator[SampleInput]:
    """Draw the samples that the CPU takes: the others say nothing about the device."""
    with (
        mock.patch("torch.testing._internal.common_utils.set_rng_seed", _seed),
        # reads the source of every frame of the stack, in search of a test case of unittest: most of the time
        mock.patch("torch.testing._internal.common_utils.extract_test_fn", return_value=None),
        mock.patch("torch.testing._internal.opinfo.core.extract_test_fn", return_value=None),
    ):
        drawn = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), SAMPLES))
    for sample in drawn:
        try:
            call(op, sample)
        except Exception:
            continue
        yield sample


def _seed(seed: int = 1234) -> None:
    """Seed the CPU alone: torch.manual_seed remembers a stack trace a call for each device that is not there."""
    torch.default_generator.manual_seed(seed)


def call(op: Any, sample: SampleInput) -> Any:
    return op(sample.input, *sample.args, **sample.kwargs)


def on_npu(sample: SampleInput) -> SampleInput:
    arguments = tree_map(_to_npu, (sample.input, sample.args, sample.kwargs))
    return SampleInput(arguments[0], args=arguments[1], kwargs=arguments[2])


def with_more_bits(sample: SampleInput, narrow: torch.dtype, wide: torch.dtype) -> SampleInput:
    """Make the sample with its tensors of one dtype in another one."""

    def widened(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != narrow:
            return value
        return value.detach().to(wide).requires_grad_(value.requires_grad)

    arguments = tree_map(widened, (sample.input, sample.args, sample.kwargs))
    return SampleInput(arguments[0], args=arguments[1], kwargs=arguments[2])


def _to_npu(value: Any) -> Any:
    """Make the same view of the same storage, on the device."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return torch.device("npu")
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided:
        return value.detach().to("npu").requires_grad_(value.requires_grad)
    plain = value.detach().resolve_conj().resolve_neg()
    storage = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage())
    moved = storage.to("npu").as_strided(plain.size(), plain.stride(), plain.storage_offset())
    return moved.requires_grad_(value.requires_grad)


def tensors(value: Any) -> list[torch.Tensor]:
    """Copy all tensors: some operators of the database return the tensor that the next call writes to."""
    return [leaf.detach().clone() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def differentiable(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def agree(op: Any, sample: SampleInput, found: Any, expected: Any, run: Callable[[SampleInput], Any]) -> None:
    """Compare with what the CPU found; where that is no nearer to the truth, with what ``run`` finds with more bits.

    Where chance or what is left in memory decides, only shapes and dtypes.
    """
    try:
        compare(found, expected)
    except AssertionError:
        if _agrees_with_float32(found, sample, run) or _is_as_near_to_float64(found, expected, sample, run):
            return
        if "empty" not in op.name and _is_determined(op, sample):
            raise
        compare(found, expected, values=False)


def _agrees_with_float32(found: Any, sample: SampleInput, run: Callable[[SampleInput], Any]) -> bool:
    """Tell whether the device is nearer to float32 than the CPU, which rounds to 16 bits between additions."""
    expected = tensors(run(with_more_bits(sample, torch.bfloat16, torch.float32)))
    results = tensors(found)
    if [t.shape for t in results] != [t.shape for t in expected]:
        return False
    try:
        for a, b in zip(results, expected):
            compare(a, b.to(torch.bfloat16) if a.dtype == torch.bfloat16 else b)
    except AssertionError:
        return False
    return True


def _is_as_near_to_float64(found: Any, expected: Any, sample: SampleInput, run: Callable[[SampleInput], Any]) -> bool:
    """Tell whether the device is about as near to float64 as the CPU, which may sum in another order.

    Its operators sum attention one by one, and the CPU in one kernel: four times its largest error are allowed.
    """
    results, others = tensors(found), tensors(expected)
    if {t.dtype for t in (*results, *others)} != {torch.float32} or any(t.layout != torch.strided for t in others):
        return False
    truths = tensors(run(with_more_bits(sample, torch.float32, torch.float64)))
    if not [t.shape for t in results] == [t.shape for t in others] == [t.shape for t in truths]:
        return False
    errors = [[(t.cpu() - truth).abs().max() for t, truth in zip(side, truths)] for side in (results, others)]
    return all(device <= 4 * cpu for device, cpu in zip(*errors))


def _is_determined(op: Any, sample: SampleInput) -> bool:
    """Tell whether the arguments decide the result."""
    manual_seed = torch.manual_seed
    results = []
    for shift in range(8):  # few random bits may be equal by chance
        # samples of random operators set a seed of their own
        with mock.patch("torch.manual_seed", lambda seed, shift=shift: manual_seed(seed + shift)):
            results.append(tensors(call(op, sample)))
    try:
        for other in results[1:]:
            assert_close(results[0], other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def compare(found: Any, expected: Any, values: bool = True) -> None:
    """Compare with torch.testing's tolerances of the dtype; both devices run the CPU's kernels.

    In 16 bits a sum of terms that cancel is off by the rounding of its largest term: two roundings of bfloat16.
    """
    found, expected = tensors(found), tensors(expected)
    assert [(t.device.type, t.dtype, t.shape) for t in found] == [("npu", t.dtype, t.shape) for t in expected]
    for a, b in zip(found, expected) if values else ():
        if b.dtype == torch.bfloat16 and b.layout == torch.strided and b.numel():
            largest = b.float().nan_to_num(posinf=0, neginf=0).abs().max().item()
            assert_close(a.cpu(), b, rtol=1.6e-2, atol=largest * 2**-7, equal_nan=True, check_stride=False)
        else:
            assert_close(a.cpu(), b, equal_nan=True, check_stride=False)
