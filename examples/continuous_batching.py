"""Generate for many prompts at once: sequences join and leave a batch while it runs, with keys and values in pages."""

from kernels_ext_npu.demo import arguments

MODEL = arguments.read("Qwen/Qwen3-0.6B", tiny="Qwen3").model

from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import kernels_ext_npu

QUESTIONS = ["Why is the sky blue?", "What is a prime number?", "Who wrote Faust?", "How far is the moon?"]

kernels_ext_npu.register()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(
    MODEL, dtype="bfloat16", device_map="npu", use_kernels=True, attn_implementation="npu_flash_attention"
)
print(kernels_ext_npu.report(model))

prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
    for question in QUESTIONS
]
# without numbers the pages take most of the free memory, which is that of the host on the software device
pages = ContinuousBatchingConfig(page_size=64, num_blocks=64, max_batch_tokens=256)
outputs = model.generate_batch(
    prompts,
    generation_config=GenerationConfig(max_new_tokens=32, do_sample=False, eos_token_id=tokenizer.eos_token_id),
    continuous_batching_config=pages,
)
for question, name in zip(QUESTIONS, sorted(outputs)):
    print(f"{question} {tokenizer.decode(outputs[name].generated_tokens)}")
