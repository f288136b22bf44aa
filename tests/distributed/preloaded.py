"""What the processes of `processes.py` have in common: imported once, by the process that they are forked from.

Nothing here may touch a device: one that was used cannot be used again behind a fork.
"""

import softnpu  # noqa: F401, I001  before torch
import gc

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import kernels_ext_npu  # noqa: F401
from tests.distributed import comparing, splitting  # noqa: F401

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # the collector of a process neither visits nor copies what all of them share
