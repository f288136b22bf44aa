"""The cases that lie at a limit on every release of CANN, in a process each."""

from pathlib import Path

import pytest

from softnpu.cann import CANN

pytestmark = pytest.mark.software
ROOT = Path(__file__).resolve().parent.parent.parent
CASES = (
    "tests/softnpu/test_limits_of_releases.py",
    "tests/softnpu/test_fusion_attention_sinks.py",
    "tests/variants/test_limits.py",
    "tests/variants/test_limits_in_training.py",
)
RELEASES = {(8, 2): "8.2.RC1", (8, 3): "8.3.RC1", (8, 5): "8.5.0", (9, 0): "9.0.0", (9, 1): "9.1"}


# of the others the oldest, which refuses most, and before a release all
OTHERS = [release for release in RELEASES if release != CANN]
LATER = OTHERS[1:]


@pytest.mark.parametrize(
    "release", [pytest.param(RELEASES[each], marks=pytest.mark.long if each in LATER else ()) for each in OTHERS]
)
def test_cases_at_a_limit_hold_on_every_release(run_python, release: str) -> None:
    """But for graphs of torch.compile, which are the same on all of them, and take as long as all others."""
    options = ["-q", "-p", "no:cacheprovider", "-k", "not compiled"]
    run_python(None, "-m", "pytest", *options, *CASES, directory=ROOT, SOFTNPU_CANN=release)


def test_a_release_that_cannot_be_read_is_the_oldest(run_forked) -> None:
    """Of what a kernel is told when it is loaded: nothing is asked afterwards."""
    found = run_forked(f"""
import sys
import softnpu, torch
from kernels import get_local_kernel
from pathlib import Path
torch.version.cann = "not known"
rope = get_local_kernel(Path({str(ROOT)!r}) / "RoPE")
cos, x = torch.ones(1, 1, 128, device="npu"), torch.ones(1, 43, 1, 128, device="npu")
sys.modules[rope.__name__ + ".one_token"].note_cos_sin(cos, cos, 2)
for heads in (42, 43):
    softnpu.reset_counters()
    rope.apply_rotary_pos_emb(x[:, :heads], x[:, :8], cos, cos)
    print({{name for name in softnpu.counters() if name.startswith("npu_")}})
""")
    assert found.stdout.splitlines()[-2:] == ["{'npu_mrope'}", "{'npu_rotary_mul'}"]
