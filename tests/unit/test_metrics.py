"""What is measured of a request, by a clock that the test winds."""

from minserve.metrics import Metrics
from minserve.protocol import Stats


def value(metrics, name):
    return metrics.registry.get_sample_value(name, {"model_name": "m"})


def test_the_times_of_a_request_are_measured_from_its_start():
    now = [100.0]
    metrics = Metrics("m", Stats, clock=lambda: now[0])
    timer = metrics.start(num_prompt_tokens=30)
    now[0] = 102.0
    timer.tokens(1)
    now[0] = 105.0
    timer.tokens(2)
    now[0] = 106.0
    timer.finish("stop")
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == 1.5
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 6.0
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 30
    assert value(metrics, "vllm:request_generation_tokens_sum") == 3


def test_a_message_without_tokens_is_no_token():
    metrics = Metrics("m", Stats)
    metrics.start(1).tokens(0)
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0


def test_two_servers_in_one_process_do_not_share_counters():
    first, second = Metrics("m", Stats), Metrics("m", Stats)
    first.start(1).finish("stop")
    assert b'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0' in first.render()
    assert b"vllm:request_success_total{" not in second.render()


def test_the_engines_counters_are_read_at_the_scrape():
    stats = Stats(num_pages=4)
    metrics = Metrics("m", lambda: stats)
    stats.num_pages_used, stats.num_preemptions = 1, 3
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:num_preemptions_total") == 3


def test_drafts_are_counted_in_all_and_by_their_place():
    stats = Stats()
    metrics = Metrics("m", lambda: stats)
    stats.note_drafts(3, [0, 2, 3])
    stats.note_drafts(1, [1])
    stats.note_drafts(0, [0, 0])
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 4
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 10
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 6
    at = [
        metrics.registry.get_sample_value(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total", {"model_name": "m", "position": str(position)}
        )
        for position in range(4)
    ]
    assert at == [3, 2, 1, 0]


def test_what_working_sets_do_is_counted_under_names_of_our_own():
    counted = {
        "demotions": "num_demotions",
        "sparse_steps": "sparse_steps",
        "sparse_retries": "sparse_retries",
        "sparse_hits": "sparse_hits",
        "sparse_misses": "sparse_misses",
        "sparse_cut_misses": "sparse_cut_misses",
        "sparse_surprises": "sparse_surprises",
        "sparse_asked": "sparse_asked",
        "sparse_fetched_bytes": "bytes_fetched",
        "sparse_stored_bytes": "bytes_stored",
    }
    stats = Stats(num_sparse=2, **{field: number for number, field in enumerate(counted.values(), start=10)})
    metrics = Metrics("m", lambda: stats)
    assert value(metrics, "minserve:num_requests_sparse") == 2
    assert [value(metrics, f"minserve:{name}_total") for name in counted] == list(range(10, 20))
