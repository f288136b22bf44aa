"""Models whose files go another way for a flash attention, or have modules that compute attention by themselves."""

import copy
from functools import partial

import pytest
import torch
from transformers import GitConfig, GitForCausalLM, HrmTextConfig, HrmTextForCausalLM, Sam2MaskDecoderConfig
from transformers.models.sam2 import modeling_sam2

import kernels_ext_npu
from tests.support import npu_counts
from tests.support.nearness import assert_each_near
from tests.support.zoo import randomise

NAME = "npu_flash_attention"
LAUNCH = "npu_fusion_attention_v3"
FLOAT32 = 5e-6  # of values of size one: both are float32, with sums in another order
assert_equal = partial(assert_each_near, tolerance=FLOAT32)
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


# ---- modules that compute by themselves ------------------------------------------------------------------------------
def test_a_module_that_computes_attention_itself_keeps_its_mask_while_others_are_served(registered) -> None:
    """The text of Git adds its mask to scores; its vision tower calls attention by name."""
    vision = {key: TEXT[key] for key in TEXT.keys() - {"vocab_size"}} | {"image_size": 8, "patch_size": 4}
    git = GitForCausalLM(GitConfig(**TEXT, vision_config=vision)).eval()
    with torch.no_grad():
        randomise(git, 0)
    with pytest.warns(UserWarning, match=f"{NAME}: Git.* does not call its attention by name, and keeps eager"):
        git.set_attn_implementation(NAME)
    ids, pixels = torch.arange(3, 13)[None], torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = git(input_ids=ids, pixel_values=pixels).logits
    ours = copy.deepcopy(git).to("npu")
    npu_counts.reset()
    with torch.no_grad():
        assert_equal(ours(input_ids=ids.npu(), pixel_values=pixels.npu()).logits, expected)
    assert npu_counts.read()[LAUNCH] == 2
    kept = {row.class_name for row in kernels_ext_npu.report(ours) if "by a name" in str(row.reason)}
    assert kept == {"GitSelfAttention"}


# ---- files that refuse a flash attention, or leave it ----------------------------------------------------------------
def test_prefixes_are_computed_where_the_file_of_the_model_refuses_them(registered) -> None:
    """HRM: tokens of a prefix see each other. A model of it is made by name, too."""
    model = HrmTextForCausalLM(HrmTextConfig(**TEXT, head_dim=16, prefix_lm=True)).eval()
    with torch.no_grad():
        randomise(model, 0)
    model.set_attn_implementation("eager")
    inputs = {"input_ids": torch.arange(3, 13)[None], "token_type_ids": torch.tensor([[1] * 4 + [0] * 6])}
    expected = model(**inputs).logits.detach()
    made = HrmTextForCausalLM._from_config(copy.deepcopy(model.config), attn_implementation=NAME)
    made.load_state_dict(model.state_dict())
    found = made.to("npu").eval()(**{name: value.npu() for name, value in inputs.items()}).logits
    assert_equal(found, expected)
    causal = model(input_ids=inputs["input_ids"]).logits
    assert (causal - expected).abs().max() > 1e-3  # the prefix is seen


def test_a_bias_of_sam_2_is_added_and_goes_to_no_other_implementation(registered, monkeypatch) -> None:
    """The file calls sdpa for it, where transformers takes it for a mask of zeros and ones on an NPU."""
    config = Sam2MaskDecoderConfig(hidden_size=32, num_attention_heads=2, attention_downsample_rate=1)
    config._attn_implementation = "eager"
    module = modeling_sam2.Sam2Attention(config).eval()
    q, k, v = (torch.randn(1, 2, 5, 32, generator=torch.Generator().manual_seed(i)) for i in range(3))
    bias = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(3))
    expected = module(q, k, v, attention_similarity=bias)[0].detach()
    config._attn_implementation = NAME
    said: list[str] = []
    monkeypatch.setattr(modeling_sam2.logger, "warning_once", said.append)
    found = module.to("npu")(q.npu(), k.npu(), v.npu(), attention_similarity=bias.npu())[0]
    assert said == []
    assert_equal(found, expected)
