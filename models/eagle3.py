"""An EAGLE-3 draft head: from states of the target and the tokens after them, states that say the next tokens
(arXiv 2503.01840).

Owns: the computation. Does not know: files (weights.eagle3), what configs mean (models.eagle3_config), where its keys
and values are kept, or which of its tokens are accepted.

With H the head's hidden size, and the three chosen states a(t) of the target after token x(t):

    h(t)    = fc a(t)                                    where the target has computed x(t): `combine`
    r       = h(t)                                       or hidden_norm(h(t)), with norm_before_residual
    y       = r + attention(cat(input_layernorm(embed(x(t + 1))), hidden_norm(h(t))))      so q, k and v take 2 H
    h(t+1)  = y + mlp(post_attention_layernorm(y))       `forward`; fed back without fc, unnormed
    logits  = lm_head(norm(h(t+1)))                      of the token x(t + 2)

The first draft takes h(t) from `combine` and the token that was sampled after it; each one that follows takes the state
that `forward` returned and the token that was drafted from it. Positions are the target's: h(t) stands at t.

Layers after the first are ordinary ones: they take H, and the first one's stream. This is inferred from what vLLM,
SGLang and NVIDIA ModelOpt compute, which agree; no paper has such a head. EAGLE 3.1 (norm_output) feeds the state back
after `norm`; then that is what `forward` returns and what `logits` takes.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from minserve.kernels.linear import linear
from minserve.models.causal_lm import CausalLM, DecoderLayer
from minserve.models.eagle3_config import NUM_AUX_LAYERS, Eagle3Config
from minserve.models.layers import Attend, GatedMLP, Linear, RMSNorm, SelfAttention, checkpoint_tensors
from minserve.models.rope import make_rope_table


class FirstLayer(nn.Module):
    """A decoder layer whose attention sees the token and the state before it side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(config, 0, in_features=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """embedded, hidden: [tokens, hidden]. Returns what the MLP adds to the residual stream, and the stream."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended = self.self_attn(torch.cat((self.input_layernorm(embedded), normed), dim=-1), attend)
        # Not RMSNorm.add, which may write its sum over `hidden`: that is the caller's.
        residual = residual + attended
        return self.mlp(self.post_attention_layernorm(residual)), residual


class Eagle3Head(nn.Module):
    """A head of any family; for inference only.

    The names of modules are those of `head_names`. What the config leaves to the target comes from `share_with`. Call
    that and `set_max_positions` once the weights are on their device, before the first forward pass.
    """

    rope_table: torch.Tensor
    """[num_positions, 2, head_dim / 2] float32, of the head's own RoPE; computed, never part of a checkpoint."""
    target_ids: torch.Tensor | None
    """[draft_vocab_size] int64: the target's id of each of the head's; None: they are the same."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        size, eps, aux_size = config.hidden_size, config.rms_norm_eps, NUM_AUX_LAYERS * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.target_vocab_size, size) if config.has_embedding else None
        self.input_norm = RMSNorm(aux_size, eps) if config.norm_before_fc else None
        norms = (RMSNorm(config.target_hidden_size, eps) for _ in range(NUM_AUX_LAYERS if config.fc_norm else 0))
        self.fc_norm = nn.ModuleList(norms)
        self.fc = Linear(aux_size, size, bias=config.fc_bias)
        later = (DecoderLayer(config, layer) for layer in range(1, config.num_layers))
        self.layers = nn.ModuleList((FirstLayer(config), *later))
        self.norm = RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False) if config.has_lm_head else None
        self.register_buffer("rope_table", torch.empty(0, 2, config.head_dim // 2), persistent=False)
        target_ids = torch.empty(config.draft_vocab_size, dtype=torch.int64) if config.maps_vocabulary else None
        self.register_buffer("target_ids", target_ids, persistent=False)
        # The target's memory: no parameters of this module, so that they are neither moved nor counted with it.
        self._shared_embedding: torch.Tensor | None = None
        self._shared_lm_head: torch.Tensor | None = None
        self.requires_grad_(False)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def set_max_positions(self, num_positions: int) -> None:
        """Make the RoPE table, for as many positions as the target has: how many the head's config counts says only
        what it was trained on."""
        self.rope_table = make_rope_table(self.config.rope, self.config.head_dim, num_positions, self.fc.weight.device)

    def share_with(self, target: CausalLM) -> None:
        """Use the target's embedding and head where the head's file leaves them out. They are not copied, but for the
        rows of lm_head that the head's vocabulary picks."""
        embedding = target.embed_tokens.weight.detach()
        assert (embedding.dtype, embedding.device) == (self.fc.weight.dtype, self.fc.weight.device)
        if self.embed_tokens is None:
            self._shared_embedding = embedding
        if self.lm_head is None:
            rows = embedding if target.lm_head is None else target.lm_head.weight.detach()
            if self.config.tie_to_embedding:
                rows = self._embedding
            self._shared_lm_head = rows if self.target_ids is None else rows[self.target_ids]

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """aux: [tokens, 3 * target_hidden_size], the inputs of `aux_layers` side by side. Returns [tokens, hidden].

        For states of the target alone; those that `forward` returns are fed back as they are.
        """
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            parts = aux.chunk(NUM_AUX_LAYERS, dim=-1)
            aux = torch.cat([norm(part.contiguous()) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        out: torch.Tensor = self.fc(aux)
        return out

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, attend: Attend) -> torch.Tensor:
        """token_ids: [tokens] int64, the target's ids; hidden: [tokens, hidden], the state before each of them, which
        stays as it is. Returns [tokens, hidden]: the states that say what follows, as they are fed back."""
        x, residual = self.layers[0](F.embedding(token_ids, self._embedding), hidden, attend)
        for layer in self.layers[1:]:
            x, residual = layer(x, residual, attend)
        if self.config.norm_output:
            return self.norm.add(x, residual)[0]
        out: torch.Tensor = x + residual
        return out

    if TYPE_CHECKING:

        def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor, attend: Attend) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden] from `forward`. Returns [rows, draft_vocab_size], by the head's own ids."""
        lm_head = self._shared_lm_head if self.lm_head is None else self.lm_head.weight
        assert lm_head is not None, "share_with comes first"
        return linear(hidden if self.config.norm_output else self.norm(hidden), lm_head)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of some of the head's; both int64, of any shape."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """As `CausalLM.checkpoint_tensors`, by the names of `head_names`; d2t and t2d are not among them."""
        return checkpoint_tensors(self)

    def describe(self) -> str:
        """What was found, in a line for the log."""
        config = self.config
        parts = [
            f"{config.num_layers} layer{'s' if config.num_layers > 1 else ''}",
            f"hidden {config.hidden_size}",
            f"{config.draft_vocab_size} of {config.target_vocab_size} tokens",
            "aux layers " + ", ".join(map(str, config.aux_layers)),
            f"rope {config.rope.kind} {config.rope.theta:g}",
        ]
        if config.window is not None:
            parts.append(f"window {config.window}")
        parts += [
            name
            for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "qk_norm")
            if getattr(config, name)
        ]
        if config.has_embedding:
            parts.append("own embedding")
        if not config.has_lm_head:
            parts.append("tied lm_head")
        return f"EAGLE-3 head ({config.family}): " + ", ".join(parts)

    @property
    def _embedding(self) -> torch.Tensor:
        embedding = self._shared_embedding if self.embed_tokens is None else self.embed_tokens.weight.detach()
        assert embedding is not None, "share_with comes first"
        return embedding


def build_eagle3(config: Eagle3Config) -> Eagle3Head:
    """The head on "meta": its parameters have shapes only, until weights are loaded."""
    with torch.device("meta"):
        return Eagle3Head(config).eval()
