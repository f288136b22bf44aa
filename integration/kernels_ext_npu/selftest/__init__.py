"""What every kernel computes on the NPU of this machine, against float64 on the host: ``kernels-ext-npu selftest``."""
