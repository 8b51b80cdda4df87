"""A tiny random model, and an engine that serves it: fast enough for a test of every option."""

import json

import torch

from minserve.config import EngineConfig
from minserve.engine.build import build_engine
from minserve.protocol import SamplingParams, Submit

VOCAB = 96
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def tiny_engine(folder, model=CONFIG, **options):
    (folder / "config.json").write_text(json.dumps(model))
    defaults = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "kv_cache_memory": 2**22}
    return build_engine(EngineConfig.checked(model_path=str(folder), **{**defaults, **options}))


def submit(request_id, prompt, **params):
    return Submit(request_id=request_id, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


def finish(engine, *submits):
    """Serve requests together to their ends: all their deltas, by id."""
    for request in submits:
        engine.submit(request)
    deltas = {request.request_id: [] for request in submits}
    while engine.has_work:
        for delta in engine.step().deltas:
            deltas[delta.request_id].append(delta)
        engine.check()
    for own in deltas.values():
        assert [delta.finish_reason is not None for delta in own] == [False] * (len(own) - 1) + [True]
    return deltas


def tokens(engine, prompt, **params):
    """The tokens of one request, alone."""
    deltas = finish(engine, submit("alone", prompt, **params))["alone"]
    return [token for delta in deltas for token in delta.token_ids]


def take_weights(engine, other):
    """Give an engine the weights of another: dummy ones are drawn on their device, differently on each."""
    ours, theirs = (dict(own._runner._model.named_parameters()) for own in (engine, other))
    with torch.no_grad():
        for name, parameter in theirs.items():
            ours[name].copy_(parameter)
