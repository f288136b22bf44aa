"""The gated delta rules of transformers: with a gate for each head, or for each channel of a key (Kimi's)."""

from kernels_ext_npu.patterns.pattern import Pattern

PATTERNS = (
    Pattern("qwen3_next:torch_chunk_gated_delta_rule", ("ChunkGatedDeltaRule",)),
    Pattern("qwen3_next:torch_recurrent_gated_delta_rule", ("FusedRecurrentGatedDeltaRule",)),
    Pattern("kimi_linear:chunk_kimi_delta_attention", ("ChunkKDA",)),
    Pattern("kimi_linear:recurrent_kimi_delta_attention", ("FusedRecurrentKDA",)),
)
