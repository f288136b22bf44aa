"""What the kernels do for a model, found without its weights and without an NPU: ``kernels-ext-npu inspect``."""
