"""The shape of an EAGLE-3 draft head, read from its config.json and from the names and shapes of its tensors.

Owns: what the published families of heads spell how, and whether a head fits its target. Imports no torch.
Does not know: files of weights, devices, or how a head is computed (models.eagle3).

    family            layers' names    the target's layers stand in        other marks
    EAGLE             midlayer         nowhere                             LlamaForCausalLM
    SpecForge         midlayer         eagle_config, if anywhere           LlamaForCausalLMEagle3
    NVIDIA ModelOpt   layers.N         eagle_config                        more than one layer, no t2d
    speculators       layers.N         eagle_aux_hidden_state_layer_ids    transformer_layer_config holds the sizes

Ids inside of eagle_config mean what these layers put out, so one is added; all others mean what comes into them.

Optional parts (embed_tokens, lm_head, d2t, biases, norms before fc, norms of q and k) are there if their tensors are:
that is what a head was trained with, while flags have been written to several places. A flag that says otherwise is
refused. So is a file whose tensors are not exactly those that follow from all this (weights.eagle3).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from minserve.errors import ConfigError, WeightsError
from minserve.folder import read_json_object
from minserve.models.config import (
    MAX_LAYERS,
    MAX_SIZE,
    MAX_VOCAB_SIZE,
    ModelConfig,
    RopeConfig,
    read_head_dim,
    read_rope,
    refuse_unsupported,
)
from minserve.models.fields import Fields

ARCHITECTURES = (
    *("LlamaForCausalLM", "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3Deep", "Eagle3LlamaForCausalLM"),
    *("LlamaEagle3DraftModel", "Eagle3DraftModel", "Eagle3Speculator"),
)
NUM_AUX_LAYERS = 3
# Below this the three layers of the rule without ids are not three: they are 2, N // 2 and N - 3.
MIN_LAYERS_FOR_RULE = 7

_IDS = "eagle_aux_hidden_state_layer_ids"
_KNOWN_AUX_FIELDS = frozenset((_IDS, "use_aux_hidden_state", "num_aux_hidden_states"))

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """One draft head.

    family: who publishes such heads, for the log.
    aux_layers: the layers of the target whose inputs it reads, ascending; the number of the target's layers means what
        the last one puts out.
    rope: its own, which is not the target's; for as many positions as the target has.
    window: how many tokens back it attended in training; None: all.
    norm_before_residual: the normed state goes on in the residual stream, not the state itself.
    norm_output: the state after the final norm is fed back, not the one before it.
    norm_before_fc, fc_norm: a norm of the three states together, and of each, before fc; in this order if both.
    has_embedding, has_lm_head: False: the target's is used, where tie_to_embedding the embedding as the head as well.
    maps_vocabulary: its ids are not the target's; d2t says which they are.
    """

    family: str
    hidden_size: int
    target_hidden_size: int
    target_vocab_size: int
    draft_vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    aux_layers: tuple[int, ...]
    window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    has_embedding: bool = False
    has_lm_head: bool = True
    tie_to_embedding: bool = False
    maps_vocabulary: bool = True


def head_names(stored: Collection[str]) -> dict[str, str]:
    """By the head's own name of each part, the name that the file has for it.

    Own names are those of ModelOpt and speculators, with later layers as in vLLM: the norm before their attention is
    input_layernorm, where Megatron's exports and SGLang say hidden_norm. Raises WeightsError if two names are one part.
    """
    names: dict[str, str] = {}
    for name in sorted(stored):
        if name.endswith("rotary_emb.inv_freq"):
            continue
        own = re.sub(r"^midlayer\.(?!\d)", "layers.0.", name.removeprefix("model."))
        own = re.sub(r"^midlayer\.(?=\d)", "layers.", own)
        if own in names:
            raise WeightsError(f"{names[own]} and {name} are the same part of a draft head")
        names[own] = name
    for own in list(names):
        layer = re.fullmatch(r"layers\.([1-9]\d*)\.hidden_norm\.weight", own)
        if layer and (usual := f"layers.{layer[1]}.input_layernorm.weight") not in names:
            names[usual] = names.pop(own)
    return names


def read_eagle3_config(folder: Path, stored: Shapes, target: ModelConfig) -> Eagle3Config:
    """Read folder/config.json of a head for this target. stored: the shape of each tensor, by its name in the file.

    Raises ConfigError, naming the field, or both sizes where the head does not fit.
    """
    outer = Fields(read_json_object(folder, "config.json"), str(folder / "config.json"))
    # What speculators keeps apart, others have in one object.
    nested = outer.has("transformer_layer_config") or outer.has("speculators_model_type")
    inner = _object(outer, "transformer_layer_config") if nested else outer
    eagle = _object(outer, "eagle_config")
    shapes = {own: stored[name] for own, name in head_names(stored).items()}
    _refuse(outer, inner, eagle)

    hidden_size = inner.integer("hidden_size", maximum=MAX_SIZE)
    num_heads = inner.integer("num_attention_heads", maximum=MAX_SIZE)
    num_kv_heads = inner.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise inner.error("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    like_qwen3 = inner.any("model_type") == "qwen3"
    if like_qwen3 and "layers.0.self_attn.q_norm.weight" not in shapes:
        raise WeightsError(f"{folder}: model_type is qwen3, but layers.0.self_attn.q_norm.weight is missing")
    _check_fit(outer, inner, shapes, target, hidden_size)
    return Eagle3Config(
        family=_family(outer, nested, stored),
        hidden_size=hidden_size,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        draft_vocab_size=_draft_vocab_size(outer, shapes, target),
        num_layers=_num_layers(inner, stored, shapes),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=read_head_dim(inner, "Qwen3ForCausalLM" if like_qwen3 else "", hidden_size, num_heads),
        intermediate_size=inner.integer("intermediate_size", maximum=MAX_SIZE),
        rms_norm_eps=inner.number("rms_norm_eps", 1e-6),
        rope=read_rope(inner)[0],
        aux_layers=_aux_layers(outer, eagle, target.num_layers),
        window=_window(inner),
        attention_bias="layers.0.self_attn.q_proj.bias" in shapes,
        mlp_bias="layers.0.mlp.gate_proj.bias" in shapes,
        fc_bias="fc.bias" in shapes,
        qk_norm="layers.0.self_attn.q_norm.weight" in shapes,
        norm_before_residual=outer.boolean("norm_before_residual", False),
        norm_output=outer.boolean("norm_output", False),
        norm_before_fc=_flagged_part(outer, eagle, "norm_before_fc", "input_norm.weight" in shapes),
        fc_norm=_flagged_part(outer, eagle, "fc_norm", "fc_norm.0.weight" in shapes),
        has_embedding="embed_tokens.weight" in shapes,
        has_lm_head="lm_head.weight" in shapes,
        tie_to_embedding=outer.boolean("tie_word_embeddings", False),
        maps_vocabulary="d2t" in shapes,
    )


def _object(fields: Fields, name: str) -> Fields:
    value = fields.any(name)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise fields.error(name, "an object")
    return Fields(value, f"{fields.source}: {name}")


def _refuse(outer: Fields, inner: Fields, eagle: Fields) -> None:
    """What would change the result, shows in no tensor and is not supported."""
    architectures = outer.any("architectures")
    if architectures is not None and (
        not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES
    ):
        raise outer.error("architectures", "a list of one of " + ", ".join(ARCHITECTURES))
    outer.choice("speculators_model_type", ("eagle3",), "eagle3")
    for fields in (outer, inner):
        if fields.has("quantization_config"):
            raise fields.error("quantization_config", "absent: a draft head's weights are plain")
        refuse_unsupported(fields)
    if outer.number("logit_scale", 1.0) != 1.0:
        raise outer.error("logit_scale", "1")
    for fields in (outer, eagle):
        if not fields.boolean("use_aux_hidden_state", True):
            raise fields.error("use_aux_hidden_state", "true: the head must read three layers of its target")
        if fields.integer("num_aux_hidden_states", NUM_AUX_LAYERS) != NUM_AUX_LAYERS:
            raise fields.error("num_aux_hidden_states", str(NUM_AUX_LAYERS))
        # Another spelling of the layers, passed over, would draft badly and never say why.
        unknown = {name for name in fields.names() - _KNOWN_AUX_FIELDS if "aux_hidden" in name or "aux_layer" in name}
        if unknown:
            raise ConfigError(f"{fields.source}: {min(unknown)} is unknown; the target's layers stand in {_IDS}")


def _family(outer: Fields, nested: bool, stored: Collection[str]) -> str:
    if nested:
        return "speculators"
    if not any("midlayer." in name for name in stored):
        return "NVIDIA ModelOpt"
    return "EAGLE" if outer.any("architectures") in (None, ["LlamaForCausalLM"]) else "SpecForge"


def _check_fit(outer: Fields, inner: Fields, shapes: Shapes, target: ModelConfig, hidden_size: int) -> None:
    """The head reads states and tokens of this target's sizes."""
    source = outer.source
    made_for = outer.integer("target_hidden_size", target.hidden_size)
    fc = shapes.get("fc.weight", ())
    if len(fc) == 2 and fc[1] % NUM_AUX_LAYERS == 0 and not outer.has("target_hidden_size"):
        made_for = fc[1] // NUM_AUX_LAYERS
    if made_for != target.hidden_size:
        raise ConfigError(
            f"{source}: the head reads states of {made_for} numbers; the target's hidden size is {target.hidden_size}"
        )
    vocab_size = inner.integer("vocab_size", target.vocab_size, maximum=MAX_VOCAB_SIZE)
    if vocab_size != target.vocab_size:
        raise ConfigError(f"{source}: the head is for {vocab_size} tokens; the target has {target.vocab_size}")
    has_embedding, has_lm_head = "embed_tokens.weight" in shapes, "lm_head.weight" in shapes
    ties_its_own = has_embedding and outer.boolean("tie_word_embeddings", False)
    if hidden_size != target.hidden_size and not (has_embedding and (has_lm_head or ties_its_own)):
        raise ConfigError(
            f"{source}: the head has no {'lm_head' if has_embedding else 'embed_tokens'} of its own; the target's has "
            f"rows of {target.hidden_size} numbers, and the head's hidden size is {hidden_size}"
        )


def _draft_vocab_size(outer: Fields, shapes: Shapes, target: ModelConfig) -> int:
    """How many tokens the head can propose. Says what contradicts itself; exact shapes are checked with all others."""
    rows = shapes.get("d2t") or shapes.get("lm_head.weight") or (target.vocab_size,)
    size = outer.integer("draft_vocab_size", rows[0], maximum=MAX_VOCAB_SIZE)
    if size < 1:
        raise WeightsError(f"{outer.source}: the head's tensors know no token")
    if size > target.vocab_size:
        raise outer.error("draft_vocab_size", f"at most {target.vocab_size}, the tokens of the target")
    if "d2t" not in shapes and size != target.vocab_size:
        raise WeightsError(f"{outer.source}: d2t is missing, which says what {size} of {target.vocab_size} tokens are")
    return size


def _num_layers(inner: Fields, stored: Collection[str], shapes: Shapes) -> int:
    """As many as have tensors: configs of the family EAGLE may count the target's layers."""
    found = {int(layer[1]) for name in shapes if (layer := re.match(r"layers\.(\d{1,4})\.", name))}
    if not found:
        raise WeightsError(f"{inner.source}: no tensor of midlayer or of layers.0 is there: this is no EAGLE-3 head")
    if not any("midlayer." in name for name in stored):
        said = inner.integer("num_hidden_layers", len(found), maximum=MAX_LAYERS)
        if said != len(found):
            raise inner.error("num_hidden_layers", f"{len(found)}, the layers that have tensors")
    if found != set(range(len(found))):
        raise WeightsError(f"{inner.source}: the tensors are of the layers {sorted(found)}, not of 0 to {max(found)}")
    return len(found)


def _aux_layers(outer: Fields, eagle: Fields, num_layers: int) -> tuple[int, ...]:
    inputs = _layer_ids(outer, first=0, last=num_layers)
    outputs = _layer_ids(eagle, first=-1, last=num_layers - 1)
    from_outputs = tuple(layer + 1 for layer in outputs)
    if inputs and outputs and inputs != from_outputs:
        raise outer.error(_IDS, f"absent, or those of eagle_config and one more, {list(from_outputs)}")
    if inputs or outputs:
        return inputs or from_outputs
    if num_layers < MIN_LAYERS_FOR_RULE:
        raise outer.error(_IDS, f"three layers of the target, for {num_layers} are too few to choose from by rule")
    return 2, num_layers // 2, num_layers - 3


def _layer_ids(fields: Fields, first: int, last: int) -> tuple[int, ...]:
    """The target's layers that are named here; an empty list is as good as none."""
    ids = fields.any(_IDS)
    if ids is None or ids == []:
        return ()
    fits = isinstance(ids, list) and len(ids) == NUM_AUX_LAYERS
    fits = fits and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in ids)
    if not fits or not first <= ids[0] < ids[1] < ids[2] <= last:
        raise fields.error(_IDS, f"three layers of the target, ascending, from {first} to {last}")
    return tuple(ids)


def _window(inner: Fields) -> int | None:
    """Layers that slide say so by their type; configs are full of windows that nobody uses."""
    types = inner.any("layer_types")
    if types is None:
        slides = inner.boolean("use_sliding_window", False) and inner.has("sliding_window")
    elif isinstance(types, list) and types in ([kind] * len(types) for kind in ("full_attention", "sliding_attention")):
        slides = "sliding_attention" in types
    else:
        raise inner.error("layer_types", 'a list of "full_attention" only, or of "sliding_attention" only')
    return inner.integer("sliding_window") if slides else None


def _flagged_part(outer: Fields, eagle: Fields, flag: str, is_there: bool) -> bool:
    for fields in (outer, eagle):
        if fields.boolean(flag, is_there) != is_there:
            raise fields.error(flag, f"{str(is_there).lower()}, as the head's tensors say")
    return is_there
