"""Decode and prefill speed of the engine alone, with dummy weights at a real model's shapes.

    python tools/bench_engine.py --config qwen3-8b --work 1x1024 8x4096 64x1024

A step's time is (time of n requests with k + 1 tokens - time with 1 token) / k; prompts are random tokens, prefix
caching is off.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from minserve.config import EngineConfig
from minserve.engine.build import build_engine
from minserve.engine.core import Engine
from minserve.protocol import SamplingParams, Submit

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CONFIGS = {"qwen3-8b": QWEN3_8B, "qwen3-8b-4-layers": {**QWEN3_8B, "num_hidden_layers": 4}}


def serve(engine: Engine, num_requests: int, context: int, num_tokens: int) -> float:
    """Seconds to serve so many requests of so many prompt and new tokens."""
    rng = random.Random(0)
    for number in range(num_requests):
        prompt = [rng.randrange(1000) for _ in range(context)]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.submit(Submit(request_id=str(number), prompt_token_ids=prompt, params=params))
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CONFIGS, default="qwen3-8b")
    parser.add_argument("--work", nargs="+", default=["1x1024", "8x4096", "64x1024"], metavar="REQUESTSxCONTEXT")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    work = [tuple(map(int, item.split("x"))) for item in args.work]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[args.config]))
        begin = time.perf_counter()
        engine = build_engine(
            EngineConfig.checked(
                model_path=folder,
                load_format="dummy",
                device=args.device,
                max_model_len=max(context for _, context in work) + args.steps + 2,
                max_num_seqs=max(requests for requests, _ in work),
                max_num_batched_tokens=8192,
                enable_prefix_caching=False,
            )
        )
    print(f"{args.config}, {engine.info.dtype}, {engine.info.device}, start {time.perf_counter() - begin:.1f} s")
    print("requests x context   step ms   decode tok/s   prefill tok/s")
    for requests, context in work:
        serve(engine, requests, context, 3)
        first = statistics.median(serve(engine, requests, context, 1) for _ in range(args.repeats))
        more = statistics.median(serve(engine, requests, context, args.steps + 1) for _ in range(args.repeats))
        step = (more - first) / args.steps
        rates = f"{requests / step:14.0f} {requests * context / first:15.0f}"
        print(f"{requests:8d} x {context:<7d} {1000 * step:9.2f} {rates}", flush=True)


if __name__ == "__main__":
    main()
