"""Programs of a user's acts, lived through by a kernelized model on the NPU and by its twin on the CPU."""
