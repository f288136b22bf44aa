"""The example of docs/several-cards.md, on two devices."""

import re
from typing import Any

import pytest
import torch

import kernels_ext_npu
from tests.distributed import engines
from tests.support import pages, zoo


def run_example(code: str, ids: torch.Tensor) -> tuple[str, torch.Tensor]:
    names: dict[str, Any] = {}
    with engines.registered(False):
        exec(code, names)
        model = names["model"]
        with torch.no_grad():
            logits = model(ids.to(model.device)).logits
        return kernels_ext_npu.report(model).summary(), logits.float().cpu()


@pytest.mark.distributed
def test_the_example_swaps_all_and_agrees_with_one_process(two_ranks, tmp_path):
    code = pages.read(pages.DOCS / "several-cards.md").code("Several cards")
    code = code.replace('"Qwen/Qwen3-30B-A3B"', repr(str(tmp_path))).replace("=4", "=2").replace("bfloat16", "float32")
    model = zoo.build("qwen3_moe").eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        expected = model(ids).logits
    for summary, logits in two_ranks.run(run_example, code, ids):
        counts = {kind: (swapped, found) for swapped, found, kind in re.findall(r"(\d+) of (\d+) ([\w ]+)", summary)}
        assert {"norms", "experts", "routers", "rotary calls"} <= counts.keys()
        assert counts.pop("heads") == ("0", "1")  # tensor parallelism wraps it, and the wrapper must see logits
        assert all(swapped == found != "0" for swapped, found in counts.values()), summary
        # as the differences of docs/parallel.md
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
