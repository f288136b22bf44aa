"""Generate the answer of a chat model."""

from kernels_ext_npu.demo import arguments

MODEL = arguments.read("Qwen/Qwen3-0.6B", tiny="Qwen3").model

from transformers import AutoModelForCausalLM, AutoTokenizer

import kernels_ext_npu

kernels_ext_npu.register()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16", device_map="npu", use_kernels=True)
print(kernels_ext_npu.report(model))

messages = [{"role": "user", "content": "Why is the sky blue?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs.to("npu"), max_new_tokens=32, do_sample=False)
print(tokenizer.decode(output[0]))
