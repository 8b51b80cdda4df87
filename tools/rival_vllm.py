"""vLLM on the same works by the same method: the other side of bench_engine.py --rival, which starts it and reads it.

    PYTHONPATH=site python tools/rival_vllm.py --work 1x1024 8x16384        alone; site: where vLLM was unpacked

With --num-draft-tokens it has a random EAGLE-3 head, and accepts drafts by luck: --accepted-length tokens a step. A
step's time is that of a token of each request then.

Reports its version when the first token of the first request is there, then the times of each work.
"""

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workload import (
    SHAPES,
    add_flags,
    draft_config,
    engine_options,
    first_request,
    measure,
    parse,
    report,
    write_config,
)

if TYPE_CHECKING:
    from vllm import LLM

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""No network, no second process; its FlashInfer sampler would be compiled at first use, and greedy text needs none."""


def build(folder: str, options: dict[str, Any]) -> "LLM":
    from vllm import LLM

    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.97,
        kv_cache_memory_bytes=options.pop("kv_cache_memory"),
        **options,
    )


def own_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Those that only this side has. folder: where a draft head's config is written."""
    options: dict[str, Any] = {"kv_cache_dtype": args.kv_cache_dtype} if args.kv_cache_dtype else {}
    if args.num_draft_tokens:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(draft_config(SHAPES[args.config].config)))
        options["speculative_config"] = {
            "method": "eagle3",
            "model": str(folder),
            "num_speculative_tokens": args.num_draft_tokens,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": args.accepted_length,
        }
    return options


def version() -> str:
    from vllm import __version__

    return str(__version__)


def serve(llm: "LLM", prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds until the last token of all."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    begin = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--kv-cache-dtype", metavar="NAME", help="such as fp8")
    parser.add_argument("--num-draft-tokens", type=int, metavar="N", help="drafts of a step")
    parser.add_argument("--accepted-length", type=float, metavar="TOKENS", help="tokens that a step with drafts gives")
    args = parse(parser)
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.config)
        llm = build(folder, engine_options(args) | own_options(args, Path(folder) / "head"))
        serve(llm, first_request(args), 1)
        report(version=version())
        for work in args.work:
            timing = measure(partial(serve, llm), work, args)
            report(work=work, first_s=timing.first_s, whole_s=timing.whole_s)


if __name__ == "__main__":
    main()
