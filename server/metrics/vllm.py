"""vLLM's names for metrics that the page has under others, for dashboards, rules and autoscalers made for vLLM."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

_ENGINE = {"engine": "0"}
"""vLLM numbers its engines."""
_SAME = (
    *("num_requests_running", "num_requests_waiting", "num_preemptions", "prompt_tokens", "generation_tokens"),
    *("request_prompt_tokens", "request_generation_tokens", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
_NAMES = {
    **{name: name for name in _SAME},
    "kv_cache_usage_perc": "kv_cache_utilization",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "prompt_cached_tokens",
    "prompt_tokens_cached": "prompt_cached_tokens",
    "request_time_per_output_token_seconds": "time_per_output_token_seconds",
}
"""Our names by vLLM's."""
_FINISHED: Mapping[str, Mapping[str, str]] = {
    "request_success": {},
    "num_aborted_requests": {"finished_reason": "abort"},
    "request_error": {"finished_reason": "error"},
}
"""Our metrics of which vLLM makes one, request_success, and the labels that it adds."""


def vllm_metrics(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield the metrics that vLLM has as well, under its names."""
    ours = {family.name.removeprefix("trtllm_"): family for family in families if family.name.startswith("trtllm_")}
    for name, known in _NAMES.items():
        if known in ours:
            yield _renamed(name, [(ours[known], {})])
    if finished := [(ours[name], labels) for name, labels in _FINISHED.items() if name in ours]:
        yield _renamed("request_success", finished)


def _renamed(name: str, parts: list[tuple[Metric, Mapping[str, str]]]) -> Metric:
    """Return one metric with the samples of all `parts`, each with the labels beside it."""
    first, _ = parts[0]
    family = Metric(f"vllm:{name}", first.documentation, first.type)
    for part, labels in parts:
        for sample in part.samples:
            suffix = sample.name.removeprefix(part.name)
            family.add_sample(family.name + suffix, {**sample.labels, **_ENGINE, **labels}, sample.value)
    return family
