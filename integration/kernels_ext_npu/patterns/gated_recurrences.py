"""The recurrences of transformers with a gate for every channel, and what makes such gates.

The real-gated linear recurrent unit of Griffin is RecurrentGemma's. The selective scan of the first Mamba has a gate
for every channel and state. The forget gates of Kimi delta attention are logarithms of decays, one for each channel of
a key.
"""

from typing import Any

from kernels_ext_npu.patterns.pattern import Pattern, require


def _is_unbounded(module: Any) -> bool:
    return module.safe_gate_lower_bound is None


_UNBOUNDED = require(_is_unbounded, "it bounds its gates by {0.safe_gate_lower_bound}")

PATTERNS = (
    Pattern("recurrent_gemma:RecurrentGemmaRglru", ("RGLRU",)),
    Pattern("falcon_mamba:mamba_selective_scan", ("SelectiveScan",)),
    Pattern("kimi_linear:KimiLinearForgetGate", ("ForgetGate",)),
    Pattern("glm5_next:Glm5NextTextForgetGate", ("ForgetGate",), _UNBOUNDED, holds=_is_unbounded),
)
