"""Prometheus metrics under the names that vLLM's dashboards and benchmarks read.

Owns: a registry of its own, so that two servers in one process do not share counters.
Does not know: HTTP, how the engine counts.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minserve.protocol import Stats

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
E2E_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS_BUCKETS = tuple(scale * 10**power for power in range(6) for scale in (1, 2, 5))

GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "vllm:num_requests_running": ("Requests in the running batch", lambda s: s.num_running),
    "vllm:num_requests_waiting": ("Requests waiting to be processed", lambda s: s.num_waiting),
    "vllm:kv_cache_usage_perc": ("KV pages in use, 1 is all", lambda s: s.num_pages_used / max(1, s.num_pages)),
    "vllm:hisparse_host_cache_usage_perc": (
        "Host blocks with something in them, 1 is all",
        lambda s: s.num_host_blocks_used / max(1, s.num_host_blocks),
    ),
    "minserve:num_requests_sparse": ("Running requests that hold a working set only", lambda s: s.num_sparse),
}
COUNTERS: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "vllm:prompt_tokens": ("Prompt tokens processed", lambda s: s.prompt_tokens),
    "vllm:generation_tokens": ("Tokens generated", lambda s: s.generation_tokens),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.prefix_hits_tokens),
    "vllm:num_preemptions": ("Requests preempted for lack of KV pages", lambda s: s.num_preemptions),
    "vllm:spec_decode_num_drafts": ("Times that drafts of a request were verified", lambda s: s.num_drafts),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens verified", lambda s: s.num_draft_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens that were right", lambda s: sum(s.accepted_at)),
    "minserve:steps": ("Steps of the engine", lambda s: s.num_steps),
    "minserve:demotions": ("Requests that became sparse", lambda s: s.num_demotions),
    "minserve:sparse_steps": ("Steps of sparse requests", lambda s: s.sparse_steps),
    "minserve:sparse_retries": ("Those of them that ran again", lambda s: s.sparse_retries),
    "minserve:sparse_hits": ("Blocks wanted for the next step and there, per KV head", lambda s: s.sparse_hits),
    "minserve:sparse_misses": ("Blocks wanted for the next step and not there", lambda s: s.sparse_misses),
    "minserve:sparse_cut_misses": ("Misses that were not fetched", lambda s: s.sparse_cut_misses),
    "minserve:sparse_asked": ("Blocks that a step's own token wanted", lambda s: s.sparse_asked),
    "minserve:sparse_surprises": ("Those of them that it had to do without", lambda s: s.sparse_surprises),
    "minserve:sparse_fetched_bytes": ("KV fetched from host memory into working sets", lambda s: s.bytes_fetched),
    "minserve:sparse_stored_bytes": ("KV of sparse requests stored in host memory", lambda s: s.bytes_stored),
}


class Metrics:
    """The metrics of one server. model_name labels every series, as in vLLM.

    num_first_tokens, first_tokens_s: how many there were, and the sum of the times that they took.
    """

    def __init__(
        self, model_name: str, stats: Callable[[], Stats], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.registry = CollectorRegistry()
        self.clock = clock
        self.num_first_tokens = 0
        self.first_tokens_s = 0.0
        self.registry.register(_EngineCollector(model_name, stats))
        self.time_to_first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token", TTFT_BUCKETS_S, model_name
        )
        self.inter_token_s = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens of a request", ITL_BUCKETS_S, model_name
        )
        self.e2e_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from a request to its last token", E2E_BUCKETS_S, model_name
        )
        self.prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request", TOKENS_BUCKETS, model_name
        )
        self.generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request", TOKENS_BUCKETS, model_name
        )
        self._success = Counter(
            "vllm:request_success", "Requests ended", ["model_name", "finished_reason"], registry=self.registry
        )
        self._refused = Counter(
            "minserve:requests_refused",
            "Requests refused for lack of room, before any work",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._model_name = model_name

    def start(self, num_prompt_tokens: int) -> "RequestTimer":
        """Begin to time one request (one choice of it)."""
        return RequestTimer(self, num_prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """A request's first token has come so long after the request."""
        self.time_to_first_token_s.observe(seconds)
        self.num_first_tokens += 1
        self.first_tokens_s += seconds

    def ended(self, reason: str) -> None:
        """Count a request's end."""
        self._success.labels(self._model_name, reason).inc()

    def refused(self, reason: str) -> None:
        """Count a request that there was no room for."""
        self._refused.labels(self._model_name, reason).inc()

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when it is scraped."""
        Gauge(name, help_text, ["model_name"], registry=self.registry).labels(self._model_name).set_function(read)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...], model_name: str) -> Histogram:
        histogram = Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(model_name)


class RequestTimer:
    """The times of one request, from its submission to its end."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._started = self._last = metrics.clock()

    def tokens(self, num_tokens: int) -> None:
        """num_tokens new tokens have arrived."""
        if num_tokens == 0:
            return
        now = self._metrics.clock()
        if self._num_tokens == 0:
            self._metrics.first_token(now - self._started)
        else:
            self._metrics.inter_token_s.observe((now - self._last) / num_tokens)
        self._num_tokens += num_tokens
        self._last = now

    def finish(self, reason: str) -> None:
        """The request has ended, with its last token or without."""
        metrics = self._metrics
        metrics.ended(reason)
        metrics.e2e_s.observe(metrics.clock() - self._started)
        metrics.prompt_tokens.observe(self._num_prompt_tokens)
        metrics.generation_tokens.observe(self._num_tokens)


class _EngineCollector(Collector):
    """Reads the engine's own counters at the moment of the scrape."""

    def __init__(self, model_name: str, stats: Callable[[], Stats]) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, (help_text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=["model_name"])
            gauge.add_metric([self._model_name], read(stats))
            yield gauge
        for name, (help_text, read) in COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=["model_name"])
            counter.add_metric([self._model_name], read(stats))
            yield counter
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were right, by their place behind the text",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(stats.accepted_at):
            by_position.add_metric([self._model_name, str(position)], count)
        yield by_position
