"""Models, tokens, probes, metrics."""

import json
import re
from pathlib import Path

import pytest

from minserve import __version__

DASHBOARD = Path(__file__).resolve().parents[2] / "tools" / "grafana" / "minserve.json"


async def get(running, path):
    async with running.http.get(path) as response:
        return response.status, await response.text()


async def test_every_served_name_is_a_model_and_names_may_hold_slashes(start):
    running = await start(served_model_names=("org/name", "alias"))
    async with running.http.get("/v1/models") as response:
        cards = (await response.json())["data"]
    assert [card["id"] for card in cards] == ["org/name", "alias"]
    assert cards[0]["max_model_len"] == 4096
    assert (await running.openai.models.retrieve("org/name")).id == "org/name"
    assert (await get(running, "/v1/models/org/name"))[0] == 200
    assert (await get(running, "/v1/models/other"))[0] == 404


async def test_tokenize_and_detokenize_are_inverse(running):
    status, answer = await running.post("/tokenize", {"model": "tiny", "prompt": "hello 世"})
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == 5
    assert answer["max_model_len"] == 4096
    status, back = await running.post("/detokenize", {"tokens": answer["tokens"]})
    assert (status, back) == (200, {"prompt": "hello 世"})


async def test_tokenize_can_show_the_tokens(running):
    _, answer = await running.post("/tokenize", {"prompt": "hello w", "return_token_strs": True})
    assert answer["token_strs"] == ["hello", " ", "w"]


async def test_a_chat_is_tokenized_as_it_would_be_answered(running):
    messages = [{"role": "user", "content": "hi"}]
    await running.chat(messages=messages)
    _, answer = await running.post("/tokenize", {"messages": messages})
    assert answer["tokens"] == running.engine.submits[0].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {}),
    ],
)
async def test_bad_token_requests_are_a_400(running, path, body):
    assert (await running.post(path, body))[0] == 400


async def test_the_probes_of_a_healthy_server(running):
    assert (await get(running, "/health"))[0] == 200
    assert (await get(running, "/ready"))[0] == 200
    assert (await running.http.post("/ping")).status == 200
    assert (await get(running, "/version"))[1] == f'{{"version":"{__version__}"}}'


async def test_every_metric_of_the_dashboard_is_one_of_ours_and_none_of_ours_is_missing_there(running):
    await running.chat()
    await running.post("/v1/chat/completions", {})
    running.service.metrics.refused("queue_full")
    text = (await get(running, "/metrics"))[1]
    served = set(re.findall(r"^((?:vllm|minserve):\w+)", text, flags=re.MULTILINE))
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    shown = set(re.findall(r"(?:vllm|minserve):\w+", " ".join(t["expr"] for p in panels for t in p.get("targets", []))))
    assert shown <= served
    assert {name for name in served if not name.endswith(("_created", "_sum", "_count"))} <= shown


async def test_metrics_are_under_vllms_names(running):
    running.engine.counters.prefix_queries_tokens = 100
    running.engine.counters.prefix_hits_tokens = 40
    running.engine.counters.num_pages_used = 16
    await running.chat()
    await running.chat(max_tokens=2)
    _, text = await get(running, "/metrics")
    label = '{model_name="tiny"}'
    for line in (
        f"vllm:num_requests_running{label} 0.0",
        f"vllm:num_requests_waiting{label} 0.0",
        f"vllm:kv_cache_usage_perc{label} 0.25",
        f"vllm:generation_tokens_total{label} 10.0",
        f"vllm:prefix_cache_queries_total{label} 100.0",
        f"vllm:prefix_cache_hits_total{label} 40.0",
        f"vllm:num_preemptions_total{label} 0.0",
        'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        f"vllm:time_to_first_token_seconds_count{label} 2.0",
        f"vllm:e2e_request_latency_seconds_count{label} 2.0",
        f"vllm:inter_token_latency_seconds_count{label} 8.0",
        f"vllm:request_generation_tokens_sum{label} 10.0",
    ):
        assert line in text.splitlines()
