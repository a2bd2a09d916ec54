"""The server's metrics as Prometheus reads them. Knows names and formats, and nothing of when things are counted.

The library's own counters take a lock and find their labels for each value: for a token that would be more than all
else that counting it costs. So its families are made from plain numbers, only when somebody asks.
Names are vLLM's with our prefix. The one label but finish_reason is model_name: none is anything a client chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl.stage8.metrics import Histogram, Metrics

__all__ = ["CONTENT_TYPE_LATEST", "prometheus_text"]

LABELS = ["model_name"]

# Name, the scheduler's name for it (`Desk.stats`), what it says.
GAUGES = (
    ("num_requests_running", "requests_running", "Requests in the running batch"),
    ("num_requests_waiting", "requests_waiting", "Requests that wait for their first or next prompt tokens to run"),
)
COUNTERS = (
    ("prefix_cache_queries", "queried_tokens", "Tokens that were looked for in the prefix cache"),
    ("prefix_cache_hits", "hit_tokens", "Tokens that were found in the prefix cache"),
    ("num_preemptions", "retractions", "Times a running request had to give its pages back"),
)


def prometheus_text(model: str, metrics: Metrics, stats: Mapping[str, int]) -> bytes:
    """stats: the scheduler's, as of its last heartbeat. Its type is CONTENT_TYPE_LATEST."""
    registry = CollectorRegistry()
    registry.register(_Families(model, metrics, stats))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, model: str, metrics: Metrics, stats: Mapping[str, int]) -> None:
        self._model, self._metrics, self._stats = model, metrics, stats

    def collect(self) -> Iterator[Metric]:
        for name, key, words in GAUGES:
            yield self._gauge(name, words, self._stats.get(key, 0))
        used = self._stats.get("pages_in_use", 0) / self._stats.get("pages_total", 1)
        yield self._gauge("kv_cache_usage_perc", "Share of the pages that requests hold: 1 is all", used)
        for name, key, words in COUNTERS:
            yield self._counter(name, words, self._stats.get(key, 0))
        yield self._counter("prompt_tokens", "Tokens of prompts that were answered", self._metrics.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens of answers", self._metrics.generation_tokens)
        yield self._ended()
        yield from self._histograms()

    def _gauge(self, name: str, words: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"minisgl:{name}", words, labels=LABELS)
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, words: str, value: float) -> Metric:
        family = CounterMetricFamily(f"minisgl:{name}", words, labels=LABELS)
        family.add_metric([self._model], value)
        return family

    def _ended(self) -> Metric:
        words = "Requests that ended: stop and length are answers, abort is a client that left, error our own"
        family = CounterMetricFamily("minisgl:request_success", words, labels=[*LABELS, "finished_reason"])
        for reason, count in self._metrics.ended.items():
            family.add_metric([self._model, reason], count)
        return family

    def _histograms(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield self._histogram("time_to_first_token", "Request start to first text", metrics.time_to_first_token)
        yield self._histogram("inter_token_latency", "Between two pieces of a text", metrics.inter_token_latency)
        yield self._histogram("e2e_request_latency", "Request start to its end", metrics.e2e_request_latency)
        yield self._histogram("request_queue_time", "Arrival to first scheduled", metrics.request_queue_time)

    def _histogram(self, name: str, words: str, histogram: Histogram) -> Metric:
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family = HistogramMetricFamily(f"minisgl:{name}_seconds", words, labels=LABELS)
        family.add_metric([self._model], buckets, histogram.sum)
        return family
