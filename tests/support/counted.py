"""Mark tests that count what a certain release of transformers holds, or what its models launch."""

from pathlib import Path

import pytest
import transformers

from kernels_ext_npu.matching.classification import COUNTED

counted = pytest.mark.skipif(transformers.__version__ != COUNTED, reason=f"what {COUNTED} holds was counted")
_REQUIREMENTS = (Path(__file__).resolve().parents[2] / "requirements.txt").read_text()
_IS_PINNED = f"transformers=={transformers.__version__};" in _REQUIREMENTS
pinned_release_only = pytest.mark.skipif(not _IS_PINNED, reason="figures are those of the pinned transformers")
