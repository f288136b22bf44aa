"""Make tiny, randomly initialised transformers models of many architectures, and inputs for them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Generator, Tensor
from transformers import PreTrainedConfig, PreTrainedModel

Inputs = dict[str, Tensor]
Maker = Callable[[int, int, Generator], Inputs]

# Values by the name of the configuration field, or by the canonical name in the configuration's attribute_map; other
# fields keep their default. Text uses the tokens 2 to 89. No token ends a sequence, so that generation always runs to
# max_new_tokens. Attention windows are shorter than the inputs.
# fmt: off
SMALL: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "sliding_window": 4, "local_attention": 8, "attention_chunk_size": 4, "no_rope_layer_interval": 2,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "intermediate_size_mlp": 96,
    "shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48, "shared_intermediate_size": 48,
    # latent attention and its indexer
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4, "o_groups": 2, "o_lora_rank": 16,
    # linear attention
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 16, "linear_num_heads": 4, "block_size": 4,
    # state space: 128 features in 8 heads
    "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "mamba_d_ssm": 128, "mamba_d_head": 16,
    "mamba_head_dim": 16, "mamba_n_heads": 8, "mamba_num_heads": 8, "n_mamba_heads": 8, "n_groups": 2,
    "mamba_n_groups": 2, "mamba_ngroups": 2, "mamba_chunk_size": 4, "chunk_size": 4, "block_multiple_of": 16,
    # low-rank additions
    "vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "adapter_rank": 8,
    # encoders and decoders
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "encoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4, "decoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "decoder_num_key_value_heads": 4, "d_ff": 96, "ffn_dim": 96,
    "hidden_dim": 96,
    # images: 16 patches
    "image_size": 16, "patch_size": 4, "num_patches": 16, "depth": 2, "projection_dim": 48, "mm_tokens_per_image": 4,
    "layer_scale_init_value": 1.0, "resampler_n_latents": 4, "resampler_n_heads": 4, "resampler_head_dim": 16,
    "num_query_tokens": 4, "projector_hidden_size": 48,
    # sound: 16 frames of 8 bins, or samples
    "num_mel_bins": 8, "max_source_positions": 8, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    # special tokens
    "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": None,
    "forced_eos_token_id": None, "begin_suppress_tokens": None, "image_token_id": 99, "video_token_id": 98,
    "audio_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95, "image_start_token_id": 96,
    "image_end_token_id": 95, "video_start_token_id": 94, "video_end_token_id": 93, "boi_token_id": 96,
    "eoi_token_id": 95, "boa_token_id": 92, "eoa_token_id": 91,
}
# Vision towers differ in width from the language model, so that mixing them up is an error.
VISION: dict[str, Any] = SMALL | {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2,
    "out_hidden_size": 64, "num_position_embeddings": 16, "position_embedding_size": 16, "pooling_kernel_size": 2,
    "window_size": 8, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "vision_output_dim": 48,
    "projector_input_dim": 48, "projector_output_dim": 48,
}
# fmt: on
PAD, START, IMAGE, AUDIO = (SMALL[f"{kind}_token_id"] for kind in ("pad", "decoder_start", "image", "audio"))


def text(batch: int, length: int, generator: Generator) -> Inputs:
    ids = torch.randint(2, 90, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :2] = PAD
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def wave(samples: int, batch: int, length: int, generator: Generator) -> Inputs:
    """Make a sound for each row, padded on the right, because the models only count the ones in the mask."""
    values = torch.randn(batch, samples, generator=generator)
    mask = torch.ones(batch, samples, dtype=torch.long)
    values[0, samples // 2 :] = 0
    mask[0, samples // 2 :] = 0
    return {"input_values": values, "attention_mask": mask}


def media(*shape: int, key: str = "pixel_values", flat: bool = False, **extra: Any) -> Maker:
    """Make random tensors of this shape for each row; further arguments are the same for every row."""

    def make(batch: int, length: int, generator: Generator) -> Inputs:
        values = torch.randn(batch, *shape, generator=generator)
        constants = {name: torch.tensor([value] * batch) for name, value in extra.items()}
        return {key: values.flatten(0, 1) if flat else values, **constants}

    return make


def prompt(tokens: int, make_media: Maker, marker: int = IMAGE, kind: int = 1) -> Maker:
    """Write text in which media take up so many tokens of each row, and are of this token type."""

    def make(batch: int, length: int, generator: Generator) -> Inputs:
        made = text(batch, length + tokens, generator)
        made["input_ids"][:, 3 : 3 + tokens] = marker
        kinds = (made["input_ids"] == marker) * kind
        return made | {"mm_token_type_ids": kinds, "token_type_ids": kinds} | make_media(batch, length, generator)

    return make


def decoding(make_encoder: Maker) -> Maker:
    def make(batch: int, length: int, generator: Generator) -> Inputs:
        ids = torch.randint(2, 90, (batch, length // 2 + 1), generator=generator)
        ids[:, 0] = START  # otherwise generate() puts it there
        return make_encoder(batch, length, generator) | {"decoder_input_ids": ids}

    return make


@dataclass(frozen=True)
class Architecture:
    family: str
    model_class: str
    config: Mapping[str, Any] = field(default_factory=dict)  # beyond SMALL; a mapping for each sub-configuration
    inputs: Maker = text


SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
MHA = {"num_key_value_heads": 4}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
# Factors that are one by default would hide that they are not applied.
GRANITE = {"embedding_multiplier": 2.0, "logits_scaling": 0.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
FALCON_H1 = {
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.8, 1.2],
    "key_multiplier": 0.9,
    "attention_out_multiplier": 1.1,
    "attention_in_multiplier": 0.6,
    "ssm_multipliers": [0.8, 0.9, 1.1, 1.2, 1.3],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.7,
}
GEMMA_3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
CONVOLUTIONS = {"conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
GEMMA_4 = SLIDING | {"global_head_dim": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}
MROPE_PARTIAL = {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
# An image and its two halves. Without the padding two rows of 8 patches are left, with a token at the end of each.
TILES = prompt(16 + 2 * (8 + 1), media(3, 3, 16, 16, image_sizes=[8, 32]))
PICTURE = media(3, 16, 16)
SIZED_PICTURE = media(3, 16, 16, image_sizes=[16, 16])
PICTURE_LIST = media(1, 3, 16, 16)
PATCHES = media(16, 48, spatial_shapes=[4, 4], pixel_attention_mask=[1] * 16)
POSITIONED_PATCHES = media(16, 48, image_position_ids=[[x, y] for y in range(4) for x in range(4)])
# Patches of two frames, four of which the models merge.
GRID = prompt(4, media(16, 96, flat=True, image_grid_thw=[1, 4, 4]))
SPECTRUM = media(8, 16, key="input_features", feature_attention_mask=[1] * 16)

dense = partial(Architecture, "dense")
moe = partial(Architecture, "moe")
state_space = partial(Architecture, "state-space")
hybrid = partial(Architecture, "hybrid")
vision_language = partial(Architecture, "vision-language")
encoder = partial(Architecture, "encoder")
encoder_decoder = partial(Architecture, "encoder-decoder")
vision = partial(Architecture, "vision")
audio = partial(Architecture, "audio")

ARCHITECTURES: dict[str, Architecture] = {
    "llama": dense("LlamaForCausalLM"),
    "mistral": dense("MistralForCausalLM"),
    "ministral": dense("MinistralForCausalLM", SLIDING),
    "qwen2": dense("Qwen2ForCausalLM"),
    "qwen3": dense("Qwen3ForCausalLM"),
    "phi": dense("PhiForCausalLM", {"qk_layernorm": True}),
    "phi3": dense("Phi3ForCausalLM"),
    "gemma": dense("GemmaForCausalLM"),
    "gemma2": dense("Gemma2ForCausalLM"),
    "gemma3_text": dense("Gemma3ForCausalLM", SLIDING),
    "gemma3n_text": dense("Gemma3nForCausalLM", GEMMA_3N),
    "gemma4_text": dense("Gemma4ForCausalLM", GEMMA_4),
    "glm": dense("GlmForCausalLM"),
    "glm4": dense("Glm4ForCausalLM"),
    "olmo": dense("OlmoForCausalLM"),
    "olmo2": dense("Olmo2ForCausalLM"),
    "olmo3": dense("Olmo3ForCausalLM", SLIDING),
    "granite": dense("GraniteForCausalLM", GRANITE),
    "nanochat": dense("NanoChatForCausalLM"),
    "doge": dense("DogeForCausalLM"),
    "diffllama": dense("DiffLlamaForCausalLM"),
    "cohere": dense("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.8}),
    "cohere2": dense("Cohere2ForCausalLM", SLIDING | {"logit_scale": 0.8}),
    "starcoder2": dense("Starcoder2ForCausalLM"),
    "stablelm": dense("StableLmForCausalLM", {"qk_layernorm": True, "use_qkv_bias": True}),
    "gpt2": dense("GPT2LMHeadModel"),
    "gpt_neox": dense("GPTNeoXForCausalLM"),
    "gptj": dense("GPTJForCausalLM", {"rotary_dim": 8}),
    "bloom": dense("BloomForCausalLM"),
    "opt": dense("OPTForCausalLM"),
    "falcon": dense("FalconForCausalLM"),
    "falcon-grouped": dense("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "mpt": dense("MptForCausalLM"),
    "smollm3": dense("SmolLM3ForCausalLM"),
    "seed_oss": dense("SeedOssForCausalLM"),
    "ernie4_5": dense("Ernie4_5ForCausalLM"),
    "hunyuan_v1_dense": dense("HunYuanDenseV1ForCausalLM"),
    "exaone4": dense("Exaone4ForCausalLM", SLIDING),
    "apertus": dense("ApertusForCausalLM"),
    "arcee": dense("ArceeForCausalLM"),
    "bitnet": dense("BitNetForCausalLM"),
    "helium": dense("HeliumForCausalLM"),
    "persimmon": dense("PersimmonForCausalLM"),
    "nemotron": dense("NemotronForCausalLM"),
    "qwen2_moe": moe("Qwen2MoeForCausalLM"),
    "qwen3_moe": moe("Qwen3MoeForCausalLM"),
    "mixtral": moe("MixtralForCausalLM"),
    "phimoe": moe("PhimoeForCausalLM"),
    "llama4_text": moe("Llama4ForCausalLM", {"interleave_moe_layer_step": 2, "floor_scale": 4}),
    "gpt_oss": moe("GptOssForCausalLM"),
    "gemma4_text-moe": moe(
        "Gemma4ForCausalLM", GEMMA_4 | {"enable_moe_block": True, "top_k_experts": 2, "attention_k_eq_v": True}
    ),
    "doge-moe": moe("DogeForCausalLM", {"is_moe": True}),
    "glm4_moe": moe("Glm4MoeForCausalLM", {"use_qk_norm": True}),
    "deepseek_v2": moe("DeepseekV2ForCausalLM", MHA | GROUPS | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": moe("DeepseekV3ForCausalLM", MHA | GROUPS),
    "deepseek_v32": moe("DeepseekV32ForCausalLM", MHA),
    "deepseek_v4": moe(
        "DeepseekV4ForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.5,
        },
    ),
    "olmoe": moe("OlmoeForCausalLM"),
    "granitemoe": moe("GraniteMoeForCausalLM", GRANITE),
    "ernie4_5_moe": moe("Ernie4_5_MoeForCausalLM"),
    "hunyuan_v1_moe": moe("HunYuanMoEV1ForCausalLM"),
    "minimax_m2": moe("MiniMaxM2ForCausalLM"),
    "dots1": moe("Dots1ForCausalLM", SLIDING),
    "longcat_flash": moe("LongcatFlashForCausalLM", MHA | {"head_dim": 8, "zero_expert_num": 2}),
    "jetmoe": moe("JetMoeForCausalLM"),
    "dbrx": moe(
        "DbrxForCausalLM",
        {
            # the configuration class has no rope_theta, but the model reads it
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 2.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2},
        },
    ),
    "mimo_v2_flash": moe("MiMoV2FlashForCausalLM"),
    "mamba": state_space("MambaForCausalLM"),
    "mamba2": state_space("Mamba2ForCausalLM", {"num_heads": 8}),
    "falcon_mamba": state_space("FalconMambaForCausalLM"),
    # the state is updated in place, which autograd refuses
    "rwkv": state_space("RwkvForCausalLM", {"use_cache": False}),
    "qwen3_next": hybrid("Qwen3NextForCausalLM", LINEAR),
    "qwen3_5_text": hybrid("Qwen3_5ForCausalLM", LINEAR | MROPE_PARTIAL),
    "qwen3_5_moe_text": hybrid("Qwen3_5MoeForCausalLM", LINEAR | MROPE_PARTIAL),
    "granitemoehybrid": hybrid("GraniteMoeHybridForCausalLM", LINEAR | GRANITE),
    "jamba": hybrid("JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "bamba": hybrid("BambaForCausalLM", {"attn_layer_indices": [1]}),
    "zamba2": hybrid(
        "Zamba2ForCausalLM",
        {
            "layers_block_type": ["linear_attention", "hybrid"],
            "num_key_value_heads": 4,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
    ),
    "nemotron_h": hybrid("NemotronHForCausalLM"),
    "falcon_h1": hybrid("FalconH1ForCausalLM", FALCON_H1),
    "lfm2": hybrid("Lfm2ForCausalLM", CONVOLUTION),
    "lfm2_moe": hybrid("Lfm2MoeForCausalLM", CONVOLUTION | {"num_dense_layers": 1}),
    "recurrent_gemma": hybrid("RecurrentGemmaForCausalLM", {"num_hidden_layers": 3}),
    "minimax": hybrid("MiniMaxForCausalLM", LINEAR | {"full_attn_alpha_factor": 1.1, "mlp_beta_factor": 0.9}),
    "kimi_linear": hybrid("KimiLinearForCausalLM", LINEAR | MHA),
    "olmo_hybrid": hybrid("OlmoHybridForCausalLM"),
    "qwen2_vl": vision_language(
        "Qwen2VLForConditionalGeneration",
        {"text_config": MROPE, "vision_config": {"embed_dim": 32, "hidden_size": 64}},
        GRID,
    ),
    "qwen2_5_vl": vision_language("Qwen2_5_VLForConditionalGeneration", {"text_config": MROPE}, GRID),
    "qwen3_vl": vision_language("Qwen3VLForConditionalGeneration", {"text_config": MROPE}, GRID),
    "qwen3_vl_moe": vision_language("Qwen3VLMoeForConditionalGeneration", {"text_config": MROPE}, GRID),
    "qwen3_5": vision_language("Qwen3_5ForConditionalGeneration", {"text_config": LINEAR | MROPE_PARTIAL}, GRID),
    "qwen3_5_moe": vision_language("Qwen3_5MoeForConditionalGeneration", {"text_config": LINEAR | MROPE_PARTIAL}, GRID),
    "glm4v": vision_language("Glm4vForConditionalGeneration", {"text_config": MROPE}, GRID),
    "glm4v_moe": vision_language("Glm4vMoeForConditionalGeneration", {"text_config": MROPE_PARTIAL}, GRID),
    "llama4": vision_language(
        "Llama4ForConditionalGeneration",
        {"vision_config": {"intermediate_size": 4 * 32}},  # four patches make a token
        prompt(4, PICTURE),
    ),
    "mistral3": vision_language("Mistral3ForConditionalGeneration", {}, prompt(4, SIZED_PICTURE)),
    "gemma3": vision_language("Gemma3ForConditionalGeneration", {"text_config": SLIDING}, prompt(4, PICTURE)),
    "gemma4": vision_language(
        "Gemma4ForConditionalGeneration",
        {"text_config": GEMMA_4 | {"use_bidirectional_attention": "vision"}, "vision_config": {"standardize": True}},
        prompt(4, POSITIONED_PATCHES),
    ),
    "idefics2": vision_language("Idefics2ForConditionalGeneration", {}, prompt(4, PICTURE_LIST)),
    "idefics3": vision_language("Idefics3ForConditionalGeneration", {}, prompt(4, PICTURE_LIST)),
    "llava": vision_language("LlavaForConditionalGeneration", {}, prompt(16, PICTURE)),
    "llava_next": vision_language("LlavaNextForConditionalGeneration", {"image_grid_pinpoints": [[16, 32]]}, TILES),
    "llava_onevision": vision_language(
        "LlavaOnevisionForConditionalGeneration", {"image_grid_pinpoints": [[16, 32]]}, TILES
    ),
    "paligemma": vision_language(
        "PaliGemmaForConditionalGeneration", {"projection_dim": 64}, prompt(16, PICTURE, kind=0)
    ),
    "internvl": vision_language("InternVLForConditionalGeneration", {}, prompt(4, PICTURE)),
    "janus": vision_language(
        "JanusForConditionalGeneration",
        {
            "vision_config": {"projection_dim": 64, "num_image_tokens": 16},
            # generates images, which forward() does not use
            "vq_config": {
                "num_embeddings": 16,
                "base_channels": 32,
                "channel_multiplier": [1],
                "num_res_blocks": 0,
                "latent_channels": 32,
                "image_token_embed_dim": 64,
            },
        },
        prompt(16, PICTURE),
    ),
    "blip-2": vision_language(
        "Blip2ForConditionalGeneration", {"qformer_config": {"encoder_hidden_size": 32}}, prompt(4, PICTURE)
    ),
    "lfm2_vl": vision_language("Lfm2VlForConditionalGeneration", {"text_config": CONVOLUTION}, prompt(4, PATCHES)),
    "bert": encoder("BertForMaskedLM"),
    "roberta": encoder("RobertaForMaskedLM"),
    "albert": encoder("AlbertForMaskedLM"),
    "deberta-v2": encoder("DebertaV2ForMaskedLM"),
    "electra": encoder("ElectraForMaskedLM"),
    "modernbert": encoder("ModernBertForMaskedLM"),
    "eurobert": encoder("EuroBertForMaskedLM"),
    "nomic_bert": encoder("NomicBertForMaskedLM"),
    "distilbert": encoder("DistilBertForMaskedLM"),
    "t5": encoder_decoder("T5ForConditionalGeneration", {"decoder_start_token_id": 1}, decoding(text)),
    "mt5": encoder_decoder("MT5ForConditionalGeneration", {}, decoding(text)),
    "t5gemma": encoder_decoder("T5GemmaForConditionalGeneration", {}, decoding(text)),
    "bart": encoder_decoder("BartForConditionalGeneration", {}, decoding(text)),
    "mbart": encoder_decoder("MBartForConditionalGeneration", {}, decoding(text)),
    "pegasus": encoder_decoder("PegasusForConditionalGeneration", {}, decoding(text)),
    "marian": encoder_decoder("MarianMTModel", {}, decoding(text)),
    "vit": vision("ViTModel", {}, PICTURE),
    "beit": vision("BeitModel", {}, PICTURE),
    "dinov2": vision("Dinov2Model", {}, PICTURE),
    "dinov3_vit": vision("DINOv3ViTModel", {"num_register_tokens": 2}, PICTURE),
    "swin": vision("SwinModel", {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 2}, PICTURE),
    "convnext": vision("ConvNextModel", {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]}, PICTURE),
    "pixtral": vision("PixtralVisionModel", {}, SIZED_PICTURE),
    "clip": vision("CLIPModel", {"text_config": {"eos_token_id": 2}}, prompt(0, PICTURE)),
    "siglip": vision("SiglipModel", {"text_config": {"projection_size": 32}}, prompt(0, PICTURE)),
    "siglip2": vision("Siglip2Model", {"text_config": {"projection_size": 32}}, prompt(0, PATCHES)),
    "whisper": audio("WhisperForConditionalGeneration", {}, decoding(SPECTRUM)),
    "moonshine": audio("MoonshineForConditionalGeneration", {}, decoding(partial(wave, 2048))),
    "wav2vec2": audio("Wav2Vec2ForCTC", CONVOLUTIONS, partial(wave, 200)),
    "hubert": audio("HubertForCTC", CONVOLUTIONS, partial(wave, 200)),
    "qwen2_audio": audio("Qwen2AudioForConditionalGeneration", {"text_config": MHA}, prompt(4, SPECTRUM, AUDIO)),
    "voxtral": audio(
        "VoxtralForConditionalGeneration",
        {"audio_config": {"intermediate_size": 4 * 64}},  # four frames make a token
        prompt(2, SPECTRUM, AUDIO),
    ),
}


def configure(cls: type[PreTrainedConfig], overrides: Mapping[str, Any], small: Mapping[str, Any]) -> PreTrainedConfig:
    canonical = {alias: name for name, alias in cls.attribute_map.items()}
    values = {}
    for entry in dataclasses.fields(cls):
        key = entry.name if entry.name in small else canonical.get(entry.name)
        if key in small:
            values[entry.name] = small[key]
    values |= overrides
    default = cls()
    for name, sub in cls.sub_configs.items():
        usual = getattr(default, name)
        if usual is not None or name in overrides:
            sub = sub if usual is None else type(usual)  # the declared one may be AutoConfig
            values[name] = configure(sub, overrides.get(name, {}), VISION if name == "vision_config" else small)
    return cls(**values)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw all weights anew: the usual initial ones and zeros hide weights that are ignored."""
    generator = Generator().manual_seed(seed)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):  # the experts of each token, which only a checkpoint sets
            order = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator).argsort()
            tensor.copy_(order[:, : tensor.shape[1]])
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        first = tensor.flatten()[0].item()
        if (tensor != first).any():
            if name in parameters:  # buffers such as position tables are meant to be what they are
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 8)  # the root of SMALL's hidden size
        elif first:
            tensor.copy_(first * (0.5 + torch.rand(tensor.shape, generator=generator)))
        else:
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    cls = getattr(transformers, ARCHITECTURES[name].model_class)
    config = configure(cls.config_class, ARCHITECTURES[name].config, SMALL)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = cls._from_config(config, dtype=dtype)
        randomise(model, seed)
    return model.eval()


def inputs(name: str, model: PreTrainedModel, batch: int = 2, length: int = 9, seed: int = 0) -> Inputs:
    """Make the arguments of forward and generate; length counts tokens of text, without those of images or sounds."""
    made = ARCHITECTURES[name].inputs(batch, length, Generator().manual_seed(seed))
    accepted = inspect.signature(model.forward).parameters
    return {
        key: value.to(model.dtype) if value.is_floating_point() else value
        for key, value in made.items()
        if key in accepted
    }


def can_generate(name: str) -> bool:
    return getattr(transformers, ARCHITECTURES[name].model_class).can_generate()


def tensors(outputs: Any) -> Iterator[Tensor]:
    """List the tensors in the outputs of a model; caches are not among them."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping | list | tuple):
        for value in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from tensors(value)


def loss(outputs: Any) -> Tensor:
    """Add up the mean squares of all outputs."""
    return sum(x.float().square().mean() for x in tensors(outputs) if x.is_floating_point() and x.requires_grad)
