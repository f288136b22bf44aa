"""The recurrences of transformers' linear attention, and what makes gates for them.

The real-gated linear recurrent unit of Griffin is RecurrentGemma's. The selective scan of the first Mamba has a gate
for every channel and state. Gated delta rules have one for each head, or for each channel of a key (Kimi's), whose
forget gates are logarithms of decays.
"""

from kernels_ext_npu.patterns.pattern import Guard, Pattern

_UNBOUNDED = Guard(lambda gate: gate.safe_gate_lower_bound is None, "it bounds its gates by {0.safe_gate_lower_bound}")
PATTERNS = (
    Pattern("recurrent_gemma:RecurrentGemmaRglru", ("RGLRU",)),
    Pattern("falcon_mamba:mamba_selective_scan", ("SelectiveScan",)),
    Pattern("kimi_linear:KimiLinearForgetGate", ("ForgetGate",)),
    Pattern("glm5_next:Glm5NextTextForgetGate", ("ForgetGate",), guard=_UNBOUNDED),
    Pattern("qwen3_next:torch_chunk_gated_delta_rule", ("ChunkGatedDeltaRule",)),
    Pattern("qwen3_next:torch_recurrent_gated_delta_rule", ("FusedRecurrentGatedDeltaRule",)),
    Pattern("kimi_linear:chunk_kimi_delta_attention", ("ChunkKDA",)),
    Pattern("kimi_linear:recurrent_kimi_delta_attention", ("FusedRecurrentKDA",)),
)
