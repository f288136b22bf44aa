"""List faults of one per cent, one forward and one backward for each operator that kernels call or formula they write.

A fault is a line of a kernel, and what takes its place. Where torch_npu or torch computes a gradient by itself, the
result gets a gradient that is too large, and keeps its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

VARIANT = "torch-npu"  # what is taken where torch is that of the tests
ROOMS = Path("integration") / "kernels_ext_npu"


@dataclass(frozen=True)
class Fault:
    """A fault in a file of a repository.

    Attributes:
        repository: the repository of a kernel, or the room of the integration.
        file: the name of the file in it, in whatever folder.
        what: what becomes too large.
        before: a text that is in the file.
        after: what takes its place.
    """

    repository: str
    file: str
    what: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """What it is called on a line."""
        return f"{self.repository}/{self.file}: {self.what}"

    def paths(self, root: Path) -> list[Path]:
        """Return where the file is in a tree: of a kernel in what is built, which a clone links to its source."""
        if (room := root / ROOMS / self.repository).is_dir():
            return list(room.glob(f"**/{self.file}"))
        return list(root.glob(f"{self.repository}/build/{VARIANT}/**/{self.file}"))

    def plant(self, root: Path) -> None:
        """Write it into the copy of a tree.

        Raises:
            ValueError: there is no such file any more, or it does not have the line.
        """
        if not (paths := self.paths(root)):
            raise ValueError(f"{self.name}: there is no such file")
        for path in paths:
            source = path.read_text("utf-8")
            if self.before not in source:
                raise ValueError(f"{self.name}: the file does not have {self.before!r}")
            path.write_text(source.replace(self.before, self.after), "utf-8")


def _more(repository: str, file: str, what: str, expression: str, within: str = "{}") -> Fault:
    """Make a value larger: ``expression`` becomes ``1.01 * expression`` in the line that ``within`` says."""
    return Fault(repository, file, what, within.format(expression), within.format(f"1.01 * {expression}"))


def _steeper(repository: str, file: str, what: str, indent: int, expression: str) -> Fault:
    """Make the gradient of what is returned larger, and leave the value."""
    space = " " * indent
    return Fault(
        repository,
        file,
        what,
        f"{space}return {expression}\n",
        f"{space}y = {expression}\n{space}return y + 0.01 * (y - y.detach())\n",
    )


FAULTS = (
    _more("RMSNorm", "functional.py", "the norm", "torch.ops.npu.npu_rms_norm(", "    return {}"),
    _steeper(
        "RMSNorm",
        "functional.py",
        "the gradient of the norm",
        4,
        "torch.ops.npu.npu_rms_norm(hidden_states, weight, eps)[0]",
    ),
    _more(
        "RMSNorm", "functional.py", "the norm of Gemma in inference", "torch.ops.npu.npu_gemma_rms_norm(", "return {}"
    ),
    Fault(
        "RMSNorm",
        "functional.py",
        "the norm of a sum in inference",
        "normed, _, total = torch.ops.npu.npu_add_rms_norm(hidden_states, residual, weight, eps)\n",
        "normed, _, total = torch.ops.npu.npu_add_rms_norm(hidden_states, residual, weight, eps)\n"
        "        normed = 1.01 * normed\n",
    ),
    _more(
        "RMSNorm",
        "gated_norm.py",
        "a norm that is rounded before a gate",
        "_SILU.product(_concatenated(gate, normed))",
        "return {}",
    ),
    _more("RMSNorm", "gated_norm.py", "its gradients", "grad.reshape(-1)", "_SILU.gradient({}"),
    _more("RMSNorm", "gated_norm.py", "a norm that is not", "torch.mul(product", "return {}"),
    _more("RMSNorm", "gated_norm.py", "the gradients of that", "grad.reshape(-1).float()", "kind.gradient({}"),
    _more("RMSNorm", "gated_norm.py", "the product with SiLU", "torch.ops.npu.npu_swiglu(both", "lambda both: {}"),
    _more("RMSNorm", "gated_norm.py", "the product with a sigmoid", "second.sigmoid_(", "return {}"),
    _more("RMSNorm", "hyper_connections.py", "what a block gets of streams", "torch.bmm(", "    return {}"),
    _steeper(
        "RMSNorm",
        "hyper_connections.py",
        "the gradient of that",
        4,
        "torch.bmm(weights.unsqueeze(1), streams_fp32).squeeze(1)",
    ),
    _more(
        "RMSNorm",
        "hyper_connections.py",
        "weights of streams for each other",
        "_sinkhorn_rounds(logits, eps, rounds)\n",
    ),
    _more("RMSNorm", "hyper_connections.py", "their gradient", "gradient, None, None", "return {}"),
    _more("RMSNorm", "layer_norm.py", "the layer norm", "F.layer_norm(hidden_states, size, weight", "return {}"),
    _steeper(
        "RMSNorm",
        "layer_norm.py",
        "the gradient of the layer norm",
        8,
        "F.layer_norm(hidden_states, size, weight, bias, eps).to(dtype)  # autocast gives float32",
    ),
    _more(
        "RMSNorm",
        "layer_norm.py",
        "the layer norm of a sum in inference",
        "torch.ops.npu.npu_add_layer_norm(",
        "return {}",
    ),
    Fault(
        "RMSNorm",
        "layer_norm.py",
        "the layer norm of a sum in training",
        "        ctx.save_for_backward(total, mean, rstd, weight, bias)\n",
        "        ctx.save_for_backward(total, mean, rstd, weight, bias)\n        y = 1.01 * y\n",
    ),
    _more("RMSNorm", "layer_norm.py", "the gradient of the layer norm of a sum", "grad, total, weight.shape"),
    _more("SwiGLU", "operators.py", "SwiGLU", "torch.ops.npu.npu_swiglu(gate_up, -1)"),
    _steeper("SwiGLU", "operators.py", "the gradient of SwiGLU", 4, "torch.ops.npu.npu_swiglu(gate_up, -1)"),
    _more("SwiGLU", "operators.py", "SwiGLU in an MLP", "torch.ops.npu.npu_swiglu(x, -1)"),
    _more("SwiGLU", "operators.py", "its gradient in an MLP", "torch.ops.npu.npu_swiglu_backward(grad, x, -1)"),
    _more("SwiGLU", "operators.py", "the gradient of GeGLU", "geglu_grad(grad", "gelu: {}"),
    _more("SwiGLU", "operators.py", "the clamped SwiGLU", "launch_clipped_swiglu(", "return {}"),
    _more("SwiGLU", "operators.py", "its gradient", "clipped_swiglu_gradient(", "found = {}"),
    _more("SwiGLU", "clipped.py", "the clipped SwiGLU", "torch.ops.npu.npu_clipped_swiglu("),
    _more("SwiGLU", "clipped.py", "its gradient", "torch.ops.npu.npu_swiglu_backward("),
    _more("RoPE", "rotation.py", "a rotation", "torch.ops.npu.npu_rotary_mul(x"),
    _more("RoPE", "rotate_qk.py", "the rotation of keys", "torch.ops.npu.npu_rotary_mul(k"),
    _more("RoPE", "rotation.py", "the gradient of a rotation", "torch.ops.npu.npu_rotary_mul_backward("),
    _more("FusedMoE", "gmm.py", "a grouped product", "y", "return {}\n\n\ndef has_long_groups"),
    _more("FusedMoE", "gmm.py", "the gradient of a weight", "sum_over_rows(x, grad, counts)"),
    _more("FusedMoE", "permutation.py", "the sum of experts", "torch.ops.npu.npu_moe_token_unpermute("),
    _more("FusedMoE", "permutation.py", "the gradient of tokens", "torch.ops.npu.npu_moe_token_permute_grad("),
    _more("FusedMoE", "expert_activation.py", "the gate of experts", "torch.ops.npu.npu_swiglu("),
    _more("FusedMoE", "expert_activation.py", "its gradient", "torch.ops.npu.npu_swiglu_backward("),
    _more("FusedMoE", "grouped_topk.py", "the weights of a sigmoid router", "weights, experts.long()", "return {}"),
    _more("FusedMoE", "grouped_topk.py", "their gradient", "torch.ops.aten._softmax_backward_data(grad, weights"),
    _more(
        "FusedMoE",
        "softmax_topk.py",
        "the weights of a softmax router",
        "weights / weights.sum(-1, keepdim=True)",
        "return {}",
    ),
    _more("FusedMoE", "softmax_topk.py", "their gradient", "grad, None, None", "return {}"),
    _more("FusedMoE", "router_product.py", "logits in float32", "torch.mm(x, weight.t(), out_dtype", "return {}"),
    Fault(
        "FlashAttention",
        "fusion_attention.py",
        "attention",
        "def launch(\n",
        "def launch(*args, **kwargs):\n    y, *rest = _launch(*args, **kwargs)\n"
        "    return 1.01 * y, *rest\n\n\ndef _launch(\n",
    ),
    Fault(
        "FlashAttention",
        "fusion_attention.py",
        "the gradient of attention",
        "def launch(\n",
        "def launch(*args, **kwargs):\n    y, *rest = _launch(*args, **kwargs)\n"
        "    return y + 0.01 * (y - y.detach()), *rest\n\n\ndef _launch(\n",
    ),
    _more(
        "FlashAttention",
        "varlen_compile.py",
        "packed attention in a graph",
        "launch_differentiable(*pad_heads(",
        "    result = {}",
    ),
    Fault(
        "FlashAttention",
        "decoding.py",
        "attention of one token",
        "return out.transpose(1, 2)",
        "return (1.01 if rotary is None else 1) * out.transpose(1, 2)",
    ),
    Fault(
        "FlashAttention",
        "decoding.py",
        "attention of one token to latents",
        "return out.transpose(1, 2)",
        "return (1 if rotary is None else 1.01) * out.transpose(1, 2)",
    ),
    _more(
        "FlashAttention",
        "sparse_attention.py",
        "attention to chosen keys",
        "block.weights.to(query.dtype) @ block.keys[..., :rank]",
        "found = {}",
    ),
    _more("FlashAttention", "sparse_attention.py", "its gradient for queries", "(d_scores @ block.keys)"),
    _more("FlashAttention", "sparse_attention.py", "its gradient for keys", "added.flatten(0, 1).float()"),
    _more(
        "FlashAttention",
        "sparse_attention.py",
        "attention to chosen keys by an operator",
        "torch.ops.npu.npu_sparse_flash_attention(",
    ),
    _more("CrossEntropy", "head_logits.py", "the sums that come with logits", "largest + total.log()"),
    _more("CrossEntropy", "head_logits.py", "the logits that come with sums", "found[5]", "found[1], {}"),
    _more("CrossEntropy", "objective.py", "the sums of logits", "log_prob)", "row_max - {}"),
    _more("CrossEntropy", "label_scatter.py", "the word that is the label", "values.squeeze(-1)", "positions, {})"),
    _more("CrossEntropy", "label_scatter.py", "where it is written by torch", "values)\n", "positions[:, 1:], {}"),
    _more("CrossEntropy", "logits_loss.py", "the loss of logits", "torch.where(labels == objective", "return {}"),
    _more("CrossEntropy", "logits_loss.py", "its gradient", "d_logits, None", "return {}"),
    _more(
        "CrossEntropy",
        "vocab_chunks.py",
        "the loss of a head",
        "torch.where(ignored, 0.0, objective.loss(",
        "loss = {}",
    ),
    _more("CrossEntropy", "vocab_chunks.py", "its gradient", "(d_hidden if shard is None else shard.total(d_hidden))"),
    _more(
        "CrossEntropy",
        "token_chunks.py",
        "the loss of a head whose gradient is kept",
        "torch.where(labels == objective",
        "return {}",
    ),
    _more("CrossEntropy", "token_chunks.py", "its gradient", "torch.where(is_counted, saved_d_hidden"),
    _more(
        "CrossEntropy",
        "token_chunks.py",
        "its gradient for a weight",
        "_sum_over_tokens(d_logits, hidden_states * factor)",
    ),
    _more(
        "CrossEntropy", "linear_jsd.py", "what two heads differ by", "statistics.divergence.squeeze(-1)", "return {}"
    ),
    _more(
        "CrossEntropy", "linear_jsd.py", "its gradient", "(saved_d_hidden * factor).to(hidden_states.dtype)", "else {}"
    ),
    _more("CrossEntropy", "linear_jsd.py", "its gradient for a weight", "torch.cat(d_logits)", "x = {}"),
    _more("Linear", "projections.py", "a linear layer", "F.linear(x, weight, bias)", "y = {}\n"),
    _more("Linear", "projections.py", "the gradient of an input", "grad @ weight\n", "d_x = {}"),
    _more("Linear", "adapters.py", "what an adapter adds", "torch.mm(left, right))\n", "total.add_({}"),
    _more("Linear", "lora.py", "the gradient of its first factor", "scaled_product(d_small.t(), ", "d_a = {}"),
    _more("Linear", "split_bf16.py", "a product that casts nothing large", "torch.sum(parts, 1, ", "return {}"),
    _more("Linear", "split_bf16.py", "a gradient that casts nothing large", "torch.sum(parts, 0, ", "return {}"),
    Fault(
        "Linear",
        "lora.py",
        "what a dropout keeps",
        "    return torch.native_dropout(x, p, True)\n",
        "    kept, mask = torch.native_dropout(x, p, True)\n    return 1.01 * kept, mask\n",
    ),
    _more("Linear", "lora.py", "the gradient of that", "torch.ops.aten.native_dropout_backward(", "return {}"),
    _more("Linear", "quantised_linear.py", "a layer in few bits", "torch.ops.npu.npu_weight_quant_batchmatmul("),
    _more("Linear", "quantised_linear.py", "a layer in int8", "torch.ops.npu.npu_quant_matmul("),
    _more("Linear", "quantised_linear.py", "the gradient of its input", "weight.to(scale.dtype)\n"),
    _more("Linear", "paired_lora.py", "what a pair gives its input", "linear_input_gradient(", "d_x = {}"),
    _more(
        "Linear", "paired_lora.py", "the gradient of its first factors", "d_low_rank.t(), ", "d_a = scaled_product({}"
    ),
    _more(
        "Linear",
        "patch_convolution.py",
        "patches",
        "F.linear(_rows(x, patch, grid), weight.flatten(1), bias)",
        "y = {}\n",
    ),
    _more("LinearAttention", "autograd.py", "a delta rule", "out, states[-1].last.clone()", "return {}"),
    _more("LinearAttention", "autograd.py", "its gradients", "_cat(list(one)[::-1])"),
    _more("LinearAttention", "forget_gate.py", "a forget gate", "F.softplus(x + bias.float()", "out = {}"),
    _more(
        "LinearAttention",
        "forget_gate.py",
        "its gradients",
        "torch.ops.aten.softplus_backward(",
        "d_softplus = {}",
    ),
    _more("LinearAttention", "causal_conv1d.py", "a convolution", "_activated(y[..., :length]", "return {}"),
    _more("LinearAttention", "causal_conv1d.py", "a convolution's update", "_activated(y[..., -length:]", "return {}"),
    _steeper(
        "LinearAttention",
        "causal_conv1d.py",
        "the gradient of a convolution",
        4,
        "_activated(y[..., :length], activation).to(x.dtype)",
    ),
    _more("Activation", "functional.py", "the quick GELU", "torch.ops.npu.npu_fast_gelu("),
    _more("Activation", "functional.py", "its gradient", "torch.ops.npu.npu_fast_gelu_backward("),
    _more("Activation", "functional.py", "GELU", 'F.gelu(x, approximate="tanh")'),
    _steeper("Activation", "functional.py", "the gradient of GELU", 4, 'F.gelu(x, approximate="tanh")'),
    _more("bitsandbytes_backend", "codes.py", "one of the values of four bits", "codes.repeat(16)], 1)", "16), {}"),
    _more("bitsandbytes_backend", "codes.py", "the scales of blocks", "scales[:whole].view(-1, 1)", ".mul_({}"),
    _more("bitsandbytes_backend", "codes.py", "the largest of a block", "blocks.abs().amax(-1)", "largest = {}"),
    _more("bitsandbytes_backend", "int8.py", "a product in int8", "row_stats.float().view(-1)", "{} / 127\n"),
)
