"""Call kernels as functions, in a module of your own: neither transformers nor a network is needed."""

from kernels_ext_npu.demo import arguments

arguments.require_npu()

import torch
from torch import nn

import kernels_ext_npu

rmsnorm = kernels_ext_npu.load("RMSNorm")
swiglu = kernels_ext_npu.load("SwiGLU")


class Block(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(hidden))
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        normed = rmsnorm.rms_norm(x, self.norm, 1e-6)
        return x + self.down(swiglu.swiglu(self.gate(normed), self.up(normed)))


torch.manual_seed(0)
block = Block(512, 1024).to("npu", torch.bfloat16)
x = torch.randn(2, 128, 512).to("npu", torch.bfloat16).requires_grad_()
y = block(x)
y.sum().backward()

# the same in float64, as torch computes it
exact, weights = x.detach().double().cpu(), {name: p.detach().double().cpu() for name, p in block.named_parameters()}
normed = nn.functional.rms_norm(exact, (512,), weights["norm"], 1e-6)
gated = nn.functional.silu(normed @ weights["gate.weight"].T) * (normed @ weights["up.weight"].T)
expected = exact + gated @ weights["down.weight"].T
difference = (y.detach().double().cpu() - expected).norm() / expected.norm()
print(f"difference from float64: {difference:.1e}")
print(f"gradients: {', '.join(name for name, p in block.named_parameters() if p.grad is not None)}")
