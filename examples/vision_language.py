"""Ask a model about a picture; kernels serve its vision tower and its language model."""

from kernels_ext_npu.demo import arguments

MODEL = arguments.read("google/gemma-3-4b-it", tiny="Gemma 3 with pictures", needs="pillow").model

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import kernels_ext_npu

kernels_ext_npu.register()
processor = AutoProcessor.from_pretrained(MODEL)
model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype="bfloat16", device_map="npu", use_kernels=True)
print(kernels_ext_npu.report(model))

picture = Image.linear_gradient("L").convert("RGB")  # or Image.open("picture.jpg")
content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is in this picture?"}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
)
output = model.generate(**inputs.to("npu"), max_new_tokens=32, do_sample=False)
print(processor.decode(output[0, inputs["input_ids"].shape[1] :]))
