"""Train on one long sequence: neither a T x T mask nor logits are stored.

`--tokens 65536` takes 65,536 tokens; 32,768 are the default.
"""

from kernels_ext_npu.demo import arguments

given = arguments.read("Qwen/Qwen3-0.6B", tiny="Qwen3", tokens=32_768)
MODEL, TOKENS = given.model, given.tokens

import torch
from transformers import AutoModelForCausalLM

import kernels_ext_npu

kernels_ext_npu.register()
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16", device_map="npu", use_kernels=True)
model.gradient_checkpointing_enable()
model.train()
print(kernels_ext_npu.report(model))

torch.manual_seed(0)
tokens = torch.randint(model.config.vocab_size, (1, TOKENS)).to("npu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
print(f"peak memory: {torch.npu.max_memory_allocated() / 2**20:.0f} MiB")
