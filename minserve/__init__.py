"""minserve: a small LLM inference server that keeps a sparse working set of each request's KV cache on the GPU."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """LLM, SamplingParams and SparseParams, imported when first used: the API process must not import torch."""
    if name == "LLM":
        from minserve.llm import LLM

        return LLM
    if name in ("SamplingParams", "SparseParams"):
        from minserve import protocol

        return getattr(protocol, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
