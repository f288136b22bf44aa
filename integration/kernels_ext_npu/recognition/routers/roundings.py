"""In which dtypes a router that was found computes, and how it rounds there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.recognition.routers.formulas import Dtypes, Router, spread
from kernels_ext_npu.recognition.routers.trials import RouterTrial, WatchedRouter, are_apart
from kernels_ext_npu.recognition.watched_runs import ROUNDINGS, is_close

# of x and of the matrix
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]
_TOKENS = (16, 4, 2)


def find_dtypes(
    trial: RouterTrial, router: Router, dims: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> Dtypes | None:
    """Return how it computes what it is given in some dtypes; None if torch refuses it, or the kernel rounds otherwise.

    What it multiplies and compares are seen in the run, and logits in these dtypes are those of torch. Rounded numbers
    may be equal where they were not: of those any may be chosen, and where sums of them are compared, the order of what
    was not rounded would be another one.
    """
    gating, watch = router.gating, WatchedRouter()
    trial.draw_vectors(0.1)
    cast = {name: each.to(weight_dtype) for name, each in trial.tensors.items() if each.is_floating_point()}
    tensors = trial.tensors | cast
    x = trial.draw(*_TOKENS[:dims], size=2.0).to(dtype)
    try:
        result = trial.run(x, tensors, watch)
    except RuntimeError:  # torch takes no factors of several dtypes
        return None
    ulp = max((torch.finfo(each).eps for each in watch.compared), default=1.0)
    is_wide = ulp <= torch.finfo(torch.float32).eps
    compares_sums = router.bias is not None or (gating.groups > 1 and gating.group_scores == "two best")
    if len(watch.multiplied) != 1 or (compares_sums and not is_wide):
        return None
    (factors,) = watch.multiplied
    logits = _multiply(router, x, tensors, factors)
    scores, exact = (gating.score(each) for each in (logits.float(), logits.double()))
    choice = scores if router.bias is None else scores + tensors[router.bias].flatten()
    experts, rows = gating.choose(choice), are_apart(router, choice, ulp)
    given = {output.what: each.flatten(0, -2) for output, each in zip(router.outputs, result) if output.is_row}
    ours, truth = (spread(gating.weigh(each, experts), experts, each)[rows] for each in (scores, exact))
    theirs = given["spread"] if "spread" in given else spread(given["weights"], given["experts"], scores)
    theirs = theirs[rows]
    limit = 0.0 if is_wide else ROUNDINGS * ulp
    is_same = bool(rows.any()) and is_close(theirs, ours, limit)
    is_same &= torch.equal(given["experts"].sort().values[rows], experts.sort().values[rows])
    for name, mine, most in (("logits", logits, 0.0), ("scores", scores, limit)):
        is_same &= name not in given or is_close(given[name], mine, most)
    if not is_wide:  # ours is to be nearer to what it is, but for a last rounding
        error = (ours.to(theirs.dtype) - truth).norm()
        is_same &= bool(error <= (theirs - truth).norm() + ulp / 2 * truth.norm())
    outputs = [each.dtype if isinstance(each, Tensor) else None for each in result]
    return Dtypes(dtype, weight_dtype, factors, tuple(outputs)) if is_same else None


def _multiply(router: Router, x: Tensor, tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    weight = tensors[router.weight].t() if router.is_transposed else tensors[router.weight]
    offset = None if router.offset is None else tensors[router.offset].flatten().to(dtype)
    return F.linear(x.flatten(0, -2).to(dtype), weight.to(dtype), offset)
