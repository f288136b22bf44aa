"""Train on sequences of which each card has a part, with torch's context_parallel and FSDP2.

`torchrun --nproc-per-node 8 split_sequences.py --tokens 262144` takes rows of 262,144 tokens; 131,072 are the default.
Without a card: `TORCH_DEVICE_BACKEND_AUTOLOAD=0 torchrun --nproc-per-node 4 -m softnpu split_sequences.py --tiny`.
"""

from kernels_ext_npu.demo import arguments

given = arguments.read("Qwen/Qwen3-0.6B", tiny="Qwen3", tokens=131_072, cards=8)
MODEL, TOKENS = given.model, given.tokens

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import kernels_ext_npu

card = f"npu:{os.environ['LOCAL_RANK']}"
torch.npu.set_device(card)
kernels_ext_npu.register()
mesh = dist.init_device_mesh("npu", (int(os.environ["WORLD_SIZE"]),))
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16", device_map=card, use_kernels=True)
model.gradient_checkpointing_enable()
model.train()
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
if dist.get_rank() == 0:
    print(kernels_ext_npu.report(model))

torch.manual_seed(0)
tokens = torch.randint(model.config.vocab_size, (1, TOKENS)).to("npu")
following = F.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
positions = torch.arange(TOKENS, device="npu").unsqueeze(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    with context_parallel(mesh, buffers=[tokens, following, positions], buffer_seq_dims=[1, 1, 1]):
        loss = model(
            input_ids=tokens,
            position_ids=positions,
            labels=tokens,
            shift_labels=following,
            num_items_in_batch=TOKENS - 1,
            use_cache=False,
        ).loss
        (loss * mesh.size()).backward()  # of which FSDP2 takes the mean
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
print(f"rank {dist.get_rank()}: peak memory: {torch.npu.max_memory_allocated() / 2**20:.0f} MiB")
dist.destroy_process_group()
