"""A Hub that is not huggingface.co: real clients against a Hub on loopback."""

from pathlib import Path

from tests.localhub import LocalHub
from tests.support.published_kernels import built

CHOOSE = """
import sys
import softnpu, kernels_ext_npu
from transformers import KernelConfig, LlamaConfig, LlamaForCausalLM
kernels_ext_npu.register()
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
model = LlamaForCausalLM(LlamaConfig(**sizes)).to("npu")
chosen = "someone/SwiGLU:SwiGLUMLP", {"version": 1, "trust_remote_code": True}
model.set_use_kernels(True, KernelConfig({"SwiGLUMLP": chosen}))
print(sys.modules[model.model.layers[0].mlp.forward.__func__.__module__].__file__)
"""


def test_somebody_may_choose_a_kernel_for_a_class_that_transformers_has_not_marked(
    run_forked, localhub: LocalHub, tmp_path: Path
) -> None:
    localhub.publish("someone/SwiGLU", built("SwiGLU"))
    mirror = {"HF_ENDPOINT": localhub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    assert "/kernels--someone--SwiGLU/" in run_forked(CHOOSE, **mirror).stdout
