"""Layers whose forward `kernels` binds to the norms of transformers. They read the members of the norm they replace.

Each returns the dtype that transformers' own forward returns. ``eps`` is ``variance_epsilon`` or ``eps``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import activation, normalization

from ._common import silu
from ._common.modules import CALL, has_hooks
from ._common.modules import Layer as _Layer
from .functional import unchecked_rms_norm, unchecked_zero_centered_rms_norm
from .gated_norm import GATES, gated_norm
from .hyper_connections import hyper_connection, hyper_head, independent_hyper_connection
from .layer_norm import add_layer_norm, layer_norm

# torch's own: somebody may have put something in their places, before or since
_LAYER_NORM_FORWARD, _SIGMOID_FORWARD = (
    cls.forward if getattr(cls.forward, "__globals__", None) is vars(module) else None
    for cls, module in ((nn.LayerNorm, normalization), (nn.Sigmoid, activation))
)
_OLMO_EPS = 1e-5  # OlmoLayerNorm.forward of transformers, models/olmo/modeling_olmo.py


class RMSNorm(_Layer):
    """Computes ``weight * x_normed``, as Llama does: a wider weight widens the result. Reads ``weight`` and eps."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = _weight(self)
        if hidden_states.dtype is not weight.dtype:
            hidden_states = _widened(hidden_states, weight)
        return unchecked_rms_norm(hidden_states, weight, read_eps(self))


class RMSNormCastLast(_Layer):
    """Computes ``(weight * x_normed).to(x.dtype)``, as Olmo 2 does. Reads eps, and ``weight`` if there is one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return unchecked_rms_norm(hidden_states, getattr(self, "weight", None), read_eps(self))


class RMSNormZeroCentered(_Layer):
    """Computes ``((1 + weight) * x_normed).to(x.dtype)``, the sum in float32, as Gemma. Reads ``weight`` and eps."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.training:  # a layer is checkpointed without a gradient first: it has to be the same when it has one
            return unchecked_rms_norm(hidden_states, 1.0 + _weight(self).float(), read_eps(self))
        return unchecked_zero_centered_rms_norm(hidden_states, _weight(self), read_eps(self))


class RMSNormWeightless(_Layer):
    """Computes ``x_normed.to(x.dtype)``, as NanoChat does. Reads eps."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return unchecked_rms_norm(hidden_states, None, read_eps(self))


class LayerNormFloat32(_Layer):
    """Computes a layer norm in float32 and rounds once, as Cohere does. Reads eps, and ``weight`` if there is one.

    Without eps it is that of Olmo's norm, whose forward holds it.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", _OLMO_EPS)
        return layer_norm(hidden_states, getattr(self, "weight", None), None, eps)


class LayerNorm(_Layer):
    """Computes ``weight * (x - mean) / std + bias``, as DeBERTa does: a wider weight widens the result.

    Reads ``weight``, ``bias`` and eps.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = _weight(self)
        return layer_norm(_widened(hidden_states, weight), weight, self.bias, read_eps(self))


class AddLayerNorm(_Layer):
    """Computes ``LayerNorm(dropout(dense(x)) + input_tensor)``, as BERT does behind attention and MLP.

    A norm that is no plain ``nn.LayerNorm``, or has hooks, is called.
    """

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        modules = self._modules
        norm, hidden_states = modules["LayerNorm"], modules["dropout"](modules["dense"](hidden_states))
        if not _is_plain(norm):
            return norm(hidden_states + input_tensor)
        parameters = norm._parameters
        return add_layer_norm(hidden_states, input_tensor, parameters["weight"], parameters["bias"], norm.eps)


class T5LayerNorm(_Layer):
    """Computes ``weight * x_normed`` in the dtype of the weight, as T5 does. Reads ``weight`` and eps."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = _weight(self)
        return unchecked_rms_norm(_widened(hidden_states, weight), weight, read_eps(self)).to(weight.dtype)


class RMSNormGated(_Layer):
    """Computes ``(weight * x_normed * activation(gate)).to(x.dtype)``, as Qwen3-Next does.

    That is the norm, rounded to the dtype of x, then the gate, which may be None. Reads ``weight``, eps and
    ``activation``: "silu", the default, or "sigmoid". Another one is left to the forward that is replaced, and so are
    these where somebody watches the calls of modules: transformers makes a module of the activation for every call.
    """

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _gated(self, RMSNormGated, hidden_states, gate, rounds_norm=True)


class RMSNormGatedCastLast(_Layer):
    """Computes the same in float32, and rounds nothing before the end, as Kimi Linear does. Reads the same members."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _gated(self, RMSNormGatedCastLast, hidden_states, gate, rounds_norm=False)


class MambaRMSNormGated(_Layer):
    """Computes ``weight * norm(x * silu(gate))`` in float32, as Mamba 2 does.

    That is the gate, which may be None, then the norm. Reads ``weight``, eps, and ``group_size`` if there is one: how
    many values in a row are normed together.
    """

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        x, weight = hidden_states.float(), _weight(self)
        if gate is not None:
            x = x * F.silu(gate.float())
        size = self.group_size if _has(self, "group_size") else x.shape[-1]
        if size == x.shape[-1]:
            normed = unchecked_rms_norm(x, weight.float(), read_eps(self))
        else:  # the operator takes no weight for each group
            normed = unchecked_rms_norm(x.unflatten(-1, (-1, size)), None, read_eps(self)).flatten(-2) * weight.float()
        return normed.to(torch.promote_types(hidden_states.dtype, weight.dtype))


class HyperConnection(_Layer):
    """Computes what a block gets of several streams, and the weights for what it gives, as DeepSeek-V4 does.

    Reads ``fn``, ``base``, ``scale``, ``hc_eps``, ``hc_sinkhorn_iters`` and the eps of ``input_norm``, which is not
    called.
    """

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norm_eps, rounds = read_eps(self.input_norm), self.hc_sinkhorn_iters
        return hyper_connection(hidden_streams, self.fn, self.base, self.scale, norm_eps, self.hc_eps, rounds)


class IndependentHyperConnection(_Layer):
    """Computes the same without weights of streams for each other, as Hunyuan V4 does. Reads ``hc_post_magnitude``."""

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor]:
        terms = read_eps(self.input_norm), self.hc_eps, self.hc_post_magnitude
        return independent_hyper_connection(hidden_streams, self.fn, self.base, self.scale, *terms)


class HyperHead(_Layer):
    """Computes what a model's last norm gets of several streams. Reads ``hc_fn``, ``hc_base``, ``hc_scale``, eps."""

    def forward(self, x: Tensor) -> Tensor:
        return hyper_head(x, self.hc_fn, self.hc_base, self.hc_scale, read_eps(self.input_norm), self.eps)


def _widened(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """Cast a tensor to the dtype that it and its weight promote to."""
    return hidden_states.to(torch.promote_types(hidden_states.dtype, weight.dtype))


def _has(module: nn.Module, name: str) -> bool:
    """Tell whether a module has an attribute that is no parameter.

    hasattr makes an exception of what is not there, after a look for parameters and modules.
    """
    return name in module.__dict__ or hasattr(type(module), name)


def _weight(module: nn.Module) -> Tensor:
    """Return the weight, as a parameter without the search that an attribute takes, or what others have made of it."""
    parameters = module._parameters
    if "weight" in parameters:
        return parameters["weight"]  # type: ignore[return-value]  # get() would be a call
    return module.weight


def read_eps(module: nn.Module) -> float:
    """Return the eps of a norm, under either of the names that transformers has for it; torch's may be None."""
    # what _has tells, without the call: every forward asks
    named = "variance_epsilon" in module.__dict__ or hasattr(type(module), "variance_epsilon")
    return module.variance_epsilon if named else module.eps


def _gated(
    module: nn.Module, layer: type[_Layer], hidden_states: Tensor, gate: Tensor | None, rounds_norm: bool
) -> Tensor:
    """Compute a norm, and its gate if there is one, as one of the layers here does for a module.

    A gate goes through SiLU, unless the norm names another function. What that cannot be told of calls the original.
    """
    if gate is None:
        return unchecked_rms_norm(hidden_states, _weight(module).float(), read_eps(module))
    # what _has tells, without the call
    name = module.activation if "activation" in module.__dict__ or hasattr(type(module), "activation") else "silu"
    if type(module).forward is layer.forward:  # it replaces nothing
        if name not in GATES:
            raise ValueError(f"{layer.__name__}: activation must be silu or sigmoid, got {name!r}")
    elif (
        name not in GATES
        or silu.is_seen()
        or nn.Sigmoid.forward is not _SIGMOID_FORWARD
        or nn.Sigmoid.__call__ is not CALL
    ):
        return type(module).forward(module, hidden_states, gate)
    return gated_norm(hidden_states, gate, _weight(module), read_eps(module), GATES[name], rounds_norm)


def _is_plain(norm: nn.Module) -> bool:
    """Tell whether a norm is torch's, and nobody watches its calls or has put something over them."""
    members = norm.__dict__
    return (
        type(norm) is nn.LayerNorm
        and nn.LayerNorm.forward is _LAYER_NORM_FORWARD
        and "forward" not in members
        and norm._parameters.get("weight") is not None
        and norm._parameters.get("bias") is not None
        and not has_hooks(norm)
    )
