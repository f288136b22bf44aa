"""Find the public names under which what is installed saves and loads; name those left out, and why."""

import importlib
import re
from typing import Any

_SPELLINGS = re.compile(r"(?:^|_)(?:save|load|push|dump|offload|unload|dispatch|state_dict|pretrained|shards)(?:_|$)")
_MERGES = re.compile(r"^merge_(?:and_unload|adapter|fsdp_weights)$")

MODULES = (
    "torch",
    "torch.export",
    "torch.hub",
    "torch.jit",
    "torch.serialization",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.checkpoint.state_dict",
    "safetensors",
    "safetensors.torch",
    "accelerate",
    "accelerate.big_modeling",
    "accelerate.checkpointing",
    "accelerate.utils",
    "accelerate.utils.modeling",
    "accelerate.utils.offload",
    "huggingface_hub",
    "huggingface_hub.serialization",
    "peft",
    "peft.utils",
    "transformers.modeling_utils",
    "transformers.trainer_utils",
)
CLASSES = (
    "torch.nn.Module",
    "torch.package.PackageExporter",
    "torch.package.PackageImporter",
    "accelerate.Accelerator",
    "huggingface_hub.PyTorchModelHubMixin",
    "peft.PeftModel",
    "peft.tuners.lora.LoraModel",
    "transformers.PreTrainedModel",
    "transformers.Trainer",
)

_HOOK = "it registers a hook, and neither saves nor loads"
_OPTIMIZER = "it is about an optimizer's state, which holds no weight of the model"
_NO_WEIGHTS = "no weights pass it"
_FSDP = "it needs processes with FSDP: tests/distributed"
_TENSOR_PARALLEL = "it needs processes with a mesh of devices: tests/distributed"
_SERVER = "it needs a server, and sends the files that save_pretrained() writes"
_OPERATOR = "it is an operator, which sends tokens to experts"
_SCRIPT = "it takes programs of TorchScript, which models of transformers are not"
_PROMPT = "it is about prompts and other learned vectors, which no layer here reads"
_IN_USE = "it is what from_pretrained() and save_pretrained() call, which are tried"

LEFT_OUT = {
    "torch.hub.load": "it downloads code, whose author loads the weights",
    "torch.npu_moe_distribute_dispatch": _OPERATOR,
    "torch.npu_moe_distribute_dispatch_v2": _OPERATOR,
    "torch.save_npugraph_tensor": "it dumps what is inside a captured graph",
    "torch.jit.load": _SCRIPT,
    "torch.jit.save": _SCRIPT,
    "torch.jit.save_jit_module_to_flatbuffer": _SCRIPT,
    "torch.serialization.get_default_load_endianness": _NO_WEIGHTS,
    "torch.serialization.set_default_load_endianness": _NO_WEIGHTS,
    "torch.distributed.checkpoint.load_sharded_optimizer_state_dict": _OPTIMIZER,
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict": _OPTIMIZER,
    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict": _OPTIMIZER,
    "torch.distributed.checkpoint.format_utils.flatten_state_dict": "it changes the names of a dictionary",
    "torch.nn.Module.register_load_state_dict_post_hook": _HOOK,
    "torch.nn.Module.register_load_state_dict_pre_hook": _HOOK,
    "torch.nn.Module.register_state_dict_post_hook": _HOOK,
    "torch.nn.Module.register_state_dict_pre_hook": _HOOK,
    "torch.package.PackageExporter.save_binary": _NO_WEIGHTS,
    "torch.package.PackageExporter.save_module": _NO_WEIGHTS,
    "torch.package.PackageExporter.save_source_file": _NO_WEIGHTS,
    "torch.package.PackageExporter.save_source_string": _NO_WEIGHTS,
    "torch.package.PackageExporter.save_text": _NO_WEIGHTS,
    "torch.package.PackageImporter.load_binary": _NO_WEIGHTS,
    "torch.package.PackageImporter.load_text": _NO_WEIGHTS,
    "accelerate.Accelerator.register_load_state_pre_hook": _HOOK,
    "accelerate.Accelerator.register_save_state_pre_hook": _HOOK,
    "accelerate.big_modeling.extract_submodules_state_dict": "it chooses among the names of a dictionary",
    "accelerate.checkpointing.load_accelerator_state": "Accelerator.load_state() is made of it",
    "accelerate.checkpointing.save_accelerator_state": "Accelerator.save_state() is made of it",
    "accelerate.utils.modeling.get_state_dict_from_offload": "get_state_dict_offloaded_model() is made of it",
    "accelerate.utils.fsdp2_load_full_state_dict": _FSDP,
    "accelerate.utils.load_fsdp_model": _FSDP,
    "accelerate.utils.load_fsdp_optimizer": _FSDP,
    "accelerate.utils.merge_fsdp_weights": _FSDP,
    "accelerate.utils.save_fsdp_model": _FSDP,
    "accelerate.utils.save_fsdp_optimizer": _FSDP,
    "accelerate.utils.load_and_quantize_model": "it needs bitsandbytes",
    "huggingface_hub.dump_environment_info": _NO_WEIGHTS,
    "huggingface_hub.metadata_load": _NO_WEIGHTS,
    "huggingface_hub.metadata_save": _NO_WEIGHTS,
    "huggingface_hub.from_pretrained_fastai": "it needs fastai",
    "huggingface_hub.push_to_hub_fastai": "it needs fastai",
    "huggingface_hub.PyTorchModelHubMixin.push_to_hub": _SERVER,
    "huggingface_hub.split_state_dict_into_shards_factory": "split_torch_state_dict_into_shards() is made of it",
    "huggingface_hub.try_to_load_from_cache": "it looks for a file, and reads none",
    "peft.get_eva_state_dict": "it computes what an adapter starts from",
    "peft.save_as_lora": "it computes an adapter from another one",
    "peft.PeftModel.get_prompt_embedding_to_save": _PROMPT,
    "transformers.modeling_utils.accelerate_disk_offload": _IN_USE,
    "transformers.modeling_utils.accelerate_dispatch": _IN_USE,
    "transformers.modeling_utils.check_torch_load_is_safe": _NO_WEIGHTS,
    "transformers.modeling_utils.convert_and_load_state_dict_in_model": _IN_USE,
    "transformers.modeling_utils.custom_object_save": _NO_WEIGHTS,
    "transformers.modeling_utils.load_offloaded_parameter": _IN_USE,
    "transformers.modeling_utils.log_state_dict_report": _NO_WEIGHTS,
    "transformers.modeling_utils.maybe_load_adapters": _IN_USE,
    "transformers.modeling_utils.get_state_dict_dtype": _NO_WEIGHTS,
    "transformers.modeling_utils.remove_tied_weights_from_state_dict": _IN_USE,
    "transformers.PreTrainedModel.barrier_after_gathered_checkpoint_save": _TENSOR_PARALLEL,
    "transformers.PreTrainedModel.gather_sharded_state_dict_for_save": _TENSOR_PARALLEL,
    "transformers.PreTrainedModel.save_distributed_checkpoint": _TENSOR_PARALLEL,
    "transformers.PreTrainedModel.should_save_on_this_rank": _TENSOR_PARALLEL,
    "transformers.Trainer.push_to_hub": _SERVER,
    "transformers.Trainer.save_metrics": _NO_WEIGHTS,
    "transformers.Trainer.save_state": _NO_WEIGHTS,
}


def resolve(path: str) -> Any:
    """Return what a public name is; a method as the function that it is."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return getattr(found, "__func__", found)
    raise ImportError(path)


def exported() -> dict[str, Any]:
    """Return everything that the installed libraries offer under such a name, each once, by the first of its names."""
    found: dict[int, tuple[str, Any]] = {}
    for path in MODULES + CLASSES:
        owner = resolve(path)
        library = path.partition(".")[0]
        for name in dir(owner):
            if name.startswith("_") or not (_SPELLINGS.search(name) or _MERGES.search(name)):
                continue
            value = resolve(f"{path}.{name}")
            if callable(value) and (getattr(value, "__module__", None) or "").startswith(library):
                found.setdefault(id(value), (f"{path}.{name}", value))
    return dict(found.values())
