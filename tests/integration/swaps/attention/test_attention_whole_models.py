"""Models that want parts of their own, and cannot be made of small sizes alone: ours against eager in float32."""

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Generator, Tensor, nn
from transformers import PreTrainedConfig

from kernels_ext_npu.matching import classification
from tests.integration.swaps.attention.test_attention_types import NAME, assert_same_outputs_and_gradients
from tests.support import attention_types as types
from tests.support.zoo import Inputs, randomise

pytestmark = pytest.mark.long

# class, config, inputs
Made = tuple[str, PreTrainedConfig, Inputs]
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def words(generator: Generator, count: int, *shape: int) -> Tensor:
    return torch.randint(2, count, shape, generator=generator)


def padded(length: int, places: slice) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, places] = 0
    return mask


def detr(generator: Generator) -> Made:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
             {"layers": 2, "attention_heads": 4, "ffn_dim": 96}.items()}  # fmt: skip
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    config = transformers.DetrConfig(d_model=64, num_queries=5, num_labels=3, backbone_config=backbone, **sizes)
    mask = torch.ones(2, 32, 32, dtype=torch.long)
    mask[0, :, 20:] = 0
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    return "DetrForObjectDetection", config, {"pixel_values": pixels, "pixel_mask": mask}


def mimi(generator: Generator) -> Made:
    config = transformers.MimiConfig(
        **TEXT, num_filters=4, num_residual_layers=1, upsampling_ratios=[4, 2], codebook_size=16, codebook_dim=16,
        vector_quantization_hidden_dimension=16, num_quantizers=4, num_semantic_quantizers=1, sliding_window=4,
        upsample_groups=64, sampling_rate=200, frame_rate=12.5,
    )  # fmt: skip
    return "MimiModel", config, {"input_values": torch.randn(2, 1, 320, generator=generator)}


def dia(generator: Generator) -> Made:
    encoder = TEXT | {"hidden_size": 32, "head_dim": 8, "num_key_value_heads": 4, "vocab_size": 40}
    cross = {"cross_num_attention_heads": 4, "cross_num_key_value_heads": 4, "cross_head_dim": 16}
    decoder = TEXT | cross | {"cross_hidden_size": 32, "vocab_size": 30, "num_channels": 3}
    ends = {"pad_token_id": 27, "eos_token_id": 26, "bos_token_id": 25}
    config = transformers.DiaConfig(
        encoder_config=encoder, decoder_config=decoder | ends, delay_pattern=[0, 1, 2], **ends
    )
    mask = padded(8, slice(5, None))
    inputs = {"input_ids": words(generator, 40, 2, 8), "decoder_input_ids": words(generator, 25, 2, 6, 3)}
    return "DiaForConditionalGeneration", config, inputs | {"attention_mask": mask}


def florence2(generator: Generator) -> Made:
    vision = {
        "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
        "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4],
        "window_size": 4, "projection_dim": 64, "max_temporal_embeddings": 4, "max_position_embeddings": 20,
    }  # fmt: skip
    text = transformers.BartConfig(
        vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64, dropout=0.0,
    ).to_dict()  # fmt: skip
    config = transformers.Florence2Config(text_config=text, vision_config=vision, image_token_id=99)
    image = 4 * 4 + 1  # patches, and one for all
    ids, mask = words(generator, 90, 2, image + 6), padded(image + 6, slice(2))
    ids[:, 3 : 3 + image] = 99
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": words(generator, 90, 2, 5)}
    inputs["pixel_values"] = torch.randn(2, 3, 32, 32, generator=generator)
    return "Florence2ForConditionalGeneration", config, inputs


def sam2(generator: Generator) -> Made:
    backbone = {
        "model_type": "sam2_hiera_det_model", "hidden_size": 16, "num_attention_heads": 1, "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [16, 32, 64, 128], "global_attention_blocks": [3],
        "num_attention_heads_per_stage": [1, 2, 4, 8], "window_size_per_stage": [4, 4, 4, 4],
        "window_positional_embedding_background_size": [4, 4],
    }  # fmt: skip
    vision = {
        "backbone_config": backbone, "backbone_channel_list": [128, 64, 32, 16], "num_feature_levels": 3,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]], "fpn_hidden_size": 32,
    }  # fmt: skip
    prompt = {"hidden_size": 32, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
    decoder = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 48}
    decoder |= {"iou_head_hidden_dim": 32, "attention_downsample_rate": 2}
    config = transformers.Sam2Config(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    inputs = {
        "input_points": 64 * torch.rand(1, 1, 2, 2, generator=generator),
        "input_labels": torch.ones(1, 1, 2).int(),
    }
    return "Sam2Model", config, inputs | {"pixel_values": torch.randn(1, 3, 64, 64, generator=generator)}


def contiguous(module: nn.Module, args: tuple) -> tuple:
    """What docs/troubleshooting.md says of GELUs that are given tensors as channels-last."""
    return tuple(x.contiguous() for x in args)


@pytest.mark.parametrize("make", [detr, mimi, dia, florence2, sam2], ids=lambda make: make.__name__)
def test_outputs_and_gradients_are_those_of_eager_attention(registered, make: Callable[[Generator], Made]) -> None:
    name, config, inputs = make(Generator().manual_seed(0))
    torch.manual_seed(0)
    model = types.without_dropout(getattr(transformers, name)._from_config(config))
    with torch.no_grad():
        randomise(model, 0)
    ours = copy.deepcopy(model).to("npu")
    for module in ours.modules():
        if "GELU" in type(module).__name__:
            module.register_forward_pre_hook(contiguous)
    assert any(classification.attention_refusal(type(module)) is None for module in types.served(model))
    model.set_attn_implementation("eager")
    ours.set_attn_implementation(NAME)
    assert_same_outputs_and_gradients([(name, inputs, types.seen(model, inputs))], model, ours)
