"""Models of diffusers, whose rotary functions are called by objects that are no modules, or imported when called."""

import copy
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import embeddings
from diffusers.models.transformers import transformer_flux
from torch import Tensor, nn

import kernels_ext_npu
from tests.integration.recognition.rotating_blocks import counted, launched, on
from tests.support import pages
from tests.support.served import rows

HEADS, HEAD_SIZE, TEXT, TOKENS = 2, 16, 7, 16


def flux() -> tuple[nn.Module, dict]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=HEAD_SIZE,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    ids = torch.zeros(TOKENS, 3)
    ids[:, 1], ids[:, 2] = torch.arange(TOKENS) // 4, torch.arange(TOKENS) % 4
    arguments = {
        "hidden_states": torch.randn(2, TOKENS, 4),
        "encoder_hidden_states": torch.randn(2, TEXT, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.ones(2),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
    }
    return model, arguments


def qwen_image() -> tuple[nn.Module, dict]:
    """Rotates by complex numbers, which it says by a setting; its norms call npu_rms_norm where there is an NPU."""
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=HEAD_SIZE,
        num_attention_heads=HEADS,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    arguments = {
        "hidden_states": torch.randn(1, TOKENS, 16),
        "encoder_hidden_states": torch.randn(1, TEXT, 16),
        "encoder_hidden_states_mask": torch.ones(1, TEXT, dtype=torch.int64),
        "timestep": torch.ones(1),
        "img_shapes": [[(1, 4, 4)]],
    }
    return model, arguments


def cogvideox() -> tuple[nn.Module, dict]:
    """Imports the function when it rotates."""
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_SIZE,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    )
    angles = torch.rand(2 * TOKENS, HEAD_SIZE)
    arguments = {
        "hidden_states": torch.randn(2, 2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 8, 8),
        "timestep": torch.tensor([3, 4]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }
    return model, arguments


# what makes a model -> the name of its rotary function, and how many tensors it rotates in a forward
MODELS = {
    flux: ("apply_rotary_emb", 4),
    qwen_image: ("apply_rotary_emb_qwen", 8),
    cogvideox: ("apply_rotary_emb", 4),
}


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def made(request, registered) -> tuple[nn.Module, nn.Module, dict, tuple[str, int]]:
    """A model with kernels, one without on the NPU, where its norms want to be, arguments, and what it rotates by."""
    torch.manual_seed(0)
    model, arguments = request.param()
    model.to("npu")
    swapped = kernels_ext_npu.kernelize(copy.deepcopy(model))
    return swapped, model, {name: on("npu", each) for name, each in arguments.items()}, MODELS[request.param]


def step(model: nn.Module, arguments: dict) -> list[Tensor]:
    """Return what a model computes, and its gradients."""
    result = model(**arguments, return_dict=False)[0]
    result.float().square().mean().backward()
    return [result, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def test_it_computes_what_it_does_without_kernels(made) -> None:
    swapped, plain, arguments, (name, count) = made
    assert {row.function: row.swapped for row in rows(swapped) if row.function} == {name: True}
    found, expected = [], []
    assert launched(lambda: found.extend(step(swapped, arguments))) == count
    kernels_ext_npu.restore(swapped)
    assert (
        launched(lambda: expected.extend(step(plain, arguments))) == 0
    )  # the function is that of all models, and back
    for mine, own in zip(found, expected, strict=True):
        # float32, with sums of a hundred numbers in another order
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5 * max(1.0, own.abs().max().item()))


def test_a_step_launches_what_the_recipe_says(registered) -> None:
    model, arguments = flux()
    model.to("npu")
    given = {name: on("npu", each) for name, each in arguments.items()}
    found = []
    for swap in (kernels_ext_npu.unregister, lambda: kernels_ext_npu.kernelize(model)):  # which registers, too
        swap()
        step(model, given)  # which asks for cos and sin, as one does in the first of many
        model.zero_grad()
        found.append(sum(counted(lambda: step(model, given)).values()))
    text = " ".join((pages.DOCS / "recipes.md").read_text().split())
    assert f"a Flux of two blocks is {found[1]} launches in place of {found[0]}" in text


def test_another_processor_is_looked_at(registered) -> None:
    model, _ = flux()
    model = kernels_ext_npu.kernelize(model.to("npu"))

    class Unrotated:
        def __call__(self, attention, hidden_states, *arguments, **kwargs):
            return hidden_states

    model.transformer_blocks[0].attn.processor = Unrotated()
    assert [row.path for row in rows(model) if row.function] == ["single_transformer_blocks.0.attn.apply_rotary_emb"]


def test_the_report_says_which_calls_are_the_functions_own(registered) -> None:
    """Those of whole tokens, before they are split into heads."""
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=16,
    )
    kernels_ext_npu.kernelize(model.to("npu"))
    assert all(row.swapped for row in rows(model) if row.function)
    given = {"hidden_states": torch.randn(2, 8, 4), "encoder_hidden_states": torch.randn(2, TEXT, 16)}
    mask, time = torch.ones(2, TEXT, dtype=torch.bool), torch.ones(2)
    sizes = {"num_frames": 2, "height": 2, "width": 2}
    moved = {name: each.npu() for name, each in given.items()}
    model(**moved, timestep=time.npu(), encoder_attention_mask=mask.npu(), **sizes)
    reasons = {(row.swapped, row.reason) for row in rows(model) if row.function}
    assert reasons == {(False, "but it computes calls of [2, 8, 16] itself: it is not known to rotate these")}
    again = kernels_ext_npu.kernelize(kernels_ext_npu.restore(model))
    assert all(row.swapped for row in rows(again) if row.function)


def test_norms_that_call_the_operator_themselves_are_named(registered) -> None:
    model, _ = qwen_image()
    model = kernels_ext_npu.kernelize(model.to("npu"))
    found = {(row.reason, row.is_candidate) for row in rows(model) if row.class_name == "RMSNorm"}
    assert found == {("its forward calls npu_rms_norm itself", False)}


def test_the_recipe_draws_what_it_does_without_kernels(registered, tmp_path: Path) -> None:
    """Two steps of a pipeline in bfloat16, whose image is nearer to that without kernels than two roundings a step."""
    absent = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    diffusers.FluxPipeline(scheduler, transformer=flux()[0], **absent).save_pretrained(tmp_path)
    code = pages.read(pages.DOCS / "recipes.md").code("Diffusion models")
    found: dict[str, Any] = {"folder": tmp_path, "absent": absent}
    exec(code.replace('"black-forest-labs/FLUX.1-dev"', "folder, **absent"), found)
    with pytest.raises(TypeError, match="a FluxPipeline is no module of torch: pass those that it holds, transformer"):
        kernels_ext_npu.kernelize(found["pipe"])
    prompt = {"prompt_embeds": torch.randn(1, TEXT, 32), "pooled_prompt_embeds": torch.randn(1, 32)}

    def draw() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        sizes = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}
        given = {name: each.to("npu", torch.bfloat16) for name, each in prompt.items()}
        return found["pipe"](**given, **sizes, generator=generator).images.float()

    images: list[Tensor] = []
    assert launched(lambda: images.append(draw())) > 0
    kernels_ext_npu.restore(found["pipe"].transformer)
    assert launched(lambda: images.append(draw())) == 0
    torch.testing.assert_close(*images, rtol=0, atol=4 * 2**-8 * images[1].abs().max().item())


def test_diffusers_has_its_functions_back() -> None:
    own = embeddings.apply_rotary_emb
    kernels_ext_npu.register()
    try:
        kernels_ext_npu.kernelize(flux()[0].to("npu"))
        assert transformer_flux.apply_rotary_emb is not own
    finally:
        kernels_ext_npu.unregister()
    assert transformer_flux.apply_rotary_emb is embeddings.apply_rotary_emb is own
