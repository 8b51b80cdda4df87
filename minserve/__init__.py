"""minserve: a small LLM inference server that keeps a sparse working set of each request's KV cache on the GPU."""

__version__ = "0.1.0"
