"""A decoder-only language model: embedding, layers, final norm, head.

Owns: the order of computation, and which part of which parameter each tensor of a checkpoint is.
Does not know: where weights come from, what a batch is made of, or how attention finds earlier keys and values.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from minserve.kernels.linear import linear
from minserve.models.config import ModelConfig
from minserve.models.layers import (
    Attend,
    AttendLast,
    GatedMLP,
    LayerConfig,
    Linear,
    RMSNorm,
    SelfAttention,
    checkpoint_tensors,
)
from minserve.models.rope import make_rope_table


@dataclass(frozen=True)
class AuxStates:
    """What comes into some layers in one forward pass, side by side: the residual stream that a draft head reads.

    layers: whose inputs; the number of layers means what the last of them puts out, before the final norm.
    states: [tokens, len(layers) * hidden] in the model's dtype, which the pass fills. The caller's memory, so that a
    CUDA graph leaves them where they are looked for.
    """

    layers: tuple[int, ...]
    states: torch.Tensor

    def take(self, layer: int, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        """x, residual: what comes into this layer, in two parts."""
        if layer not in self.layers:
            return
        for wanted, place in zip(self.layers, self.states.chunk(len(self.layers), dim=-1)):
            if wanted != layer:
                continue
            if residual is None:
                place.copy_(x)
            else:
                torch.add(x, residual, out=place)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream by the norm after it."""

    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, attend: Attend, last: AttendLast | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [tokens, hidden], what the layer before adds to the residual. Returns the same two of this layer; if last
        is given, of the rows that it wants."""
        x, residual = self.input_layernorm.add(x, residual)
        if last is None:
            x = self.self_attn(x, attend)
        else:
            x, residual = self.self_attn(x, last.last), residual[last.wanted]
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class CausalLM(nn.Module):
    """Token ids in, hidden states and logits out; for inference only: Llama 2 and 3, SmolLM2 and their kin
    (LlamaForCausalLM), and Qwen3, dense (Qwen3ForCausalLM), which differ by what their configurations say.

    The names of modules are those of Hugging Face checkpoints.
    Call `set_max_positions` once the weights are on their device, before the first forward pass.
    """

    rope_table: torch.Tensor
    """[num_positions, 2, head_dim / 2] float32; computed, never part of a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("rope_table", torch.empty(0, 2, config.head_dim // 2), persistent=False)
        self.requires_grad_(False)

    def set_max_positions(self, num_positions: int) -> None:
        """Make the RoPE table, for positions 0 to num_positions - 1, on the device of the weights."""
        device = self.embed_tokens.weight.device
        self.rope_table = make_rope_table(self.config.rope, self.config.head_dim, num_positions, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        attend: Attend,
        aux: AuxStates | None = None,
        last: AttendLast | None = None,
    ) -> torch.Tensor:
        """token_ids: [tokens] int64, of one or many sequences; attend knows where each stands; aux is filled by it.

        last: `attend`, if only the states of some rows are asked for; of the others the last layer stores keys and
        values and does no more, so that aux cannot have what it puts out. Returns [rows, hidden], normalized.
        """
        x, residual = self.embed_tokens(token_ids), None
        for index, layer in enumerate(self.layers):
            if aux is not None:
                aux.take(index, x, residual)
            x, residual = layer(x, residual, attend, last if index + 1 == len(self.layers) else None)
        if aux is not None:
            aux.take(len(self.layers), x, residual)
        return self.norm.add(x, residual)[0]

    if TYPE_CHECKING:

        def __call__(
            self,
            token_ids: torch.Tensor,
            attend: Attend,
            aux: AuxStates | None = None,
            last: AttendLast | None = None,
        ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden] from `forward`. Returns [rows, vocab] in the model's dtype."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden, head.weight)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that a checkpoint must have, by its name there: a view of the parameter that it belongs in."""
        tensors = checkpoint_tensors(self)
        return {name if name.startswith("lm_head.") else f"model.{name}": part for name, part in tensors.items()}


def build_model(config: ModelConfig) -> CausalLM:
    """The model on "meta": its parameters have shapes only, until weights are loaded."""
    with torch.device("meta"):
        return CausalLM(config).eval()
