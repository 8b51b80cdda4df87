"""The parts that decoder-only models are made of.

Owns: fused projections, norms, the gated MLP, and the frame of self-attention.
Does not know: where keys and values are kept; that is the business of the `Attend` that a forward pass is given.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import nn

from minserve.kernels.fp8 import FP8, fp8_linear
from minserve.kernels.linear import linear, linear_silu_mul
from minserve.kernels.rms_norm import add_rms_norm, rms_norm
from minserve.kernels.silu_mul import silu_mul


class LayerConfig(Protocol):
    """What a layer has to know of its model's shape: a model's own (`ModelConfig`), or a draft head's."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


Norms = tuple[torch.Tensor, torch.Tensor]
"""The weights of the norms on each head of q and of k, [head_dim] each."""


class Attend(Protocol):
    """Makes q and k ready to be compared, stores k and v of new tokens, and attends them and all that came before."""

    def __call__(self, layer: int, qkv: torch.Tensor, norms: Norms | None) -> torch.Tensor:
        """qkv: [tokens, heads + 2 * kv_heads, head_dim], contiguous. Returns [tokens, heads * head_dim].

        norms: None where the model has none.
        """


class AttendLast(Attend, Protocol):
    """Knows which tokens say something that is asked for, and can leave the others out, of use in the last layer."""

    wanted: torch.Tensor
    """[rows] int64, ascending."""

    def last(self, layer: int, qkv: torch.Tensor, norms: Norms | None) -> torch.Tensor:
        """As a call, but returns the wanted rows alone."""


class Linear(nn.Linear):
    """A projection of rows.

    weight_scale: [out] float32, if the weight is kept in 8 bits; None: it is what it says.
    """

    weight_scale: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.register_parameter("weight_scale", None)

    def keep_in_fp8(self) -> None:
        """Give the weight 8 bits and scales from now on. It must not have been loaded yet."""
        assert self.weight.is_meta
        weight, scale = torch.empty_like(self.weight, dtype=FP8), torch.empty(self.out_features, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [rows, in] -> [rows, out]."""
        if self.weight_scale is not None:
            return fp8_linear(input, self.weight, self.weight_scale, self.bias)
        return linear(input, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections of one input as one matrix, stacked along the output.

    parts: the checkpoint's name of each projection and its number of outputs, in order.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)


class RMSNorm(nn.Module):
    """Root mean square norm with a learnt weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]; normalized over the last dimension."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what the part before made to the residual stream, and normalize the stream for the part after.

        x, residual: [tokens, hidden]; residual None: the stream begins with x. Returns (normalized, residual).
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = FusedLinear(config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=bias)
        self.down_proj = Linear(size, config.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        both = self.gate_up_proj
        if both.weight_scale is None:
            x = linear_silu_mul(x, both.weight, both.bias)
        else:
            x = silu_mul(both(x))
        out: torch.Tensor = self.down_proj(x)
        return out


class SelfAttention(nn.Module):
    """The projections around attention, and the norms of q and k where the model has them (Qwen3)."""

    def __init__(self, config: LayerConfig, layer: int, in_features: int | None = None) -> None:
        """in_features: the size of the input where it is not the stream alone (EAGLE-3); None: hidden_size."""
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(in_features or config.hidden_size, parts, bias=config.attention_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    @property
    def norms(self) -> Norms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight

    def forward(
        self, x: torch.Tensor, attend: Callable[[int, torch.Tensor, Norms | None], torch.Tensor]
    ) -> torch.Tensor:
        """x: [tokens, in_features] -> [rows, hidden], as many rows as `attend` returns."""
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        out: torch.Tensor = self.o_proj(attend(self.layer, qkv, self.norms))
        return out


def checkpoint_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """By the name that a checkpoint has for each tensor, a view of the parameter or the part of one that it fills."""
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, FusedLinear):
                parent = path.rpartition(".")[0]
                pieces = torch.split_with_sizes(parameter, list(module.parts.values()))
                tensors |= {f"{parent}.{part}.{name}": piece for part, piece in zip(module.parts, pieces)}
            else:
                tensors[f"{path}.{name}"] = parameter
    return tensors
