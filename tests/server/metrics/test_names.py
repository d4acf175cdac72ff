"""The names, units and buckets of metrics: Prometheus' conventions, and vLLM's names if they are asked for."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multimodal.request import Limits
from tests.server.metrics.test_page import ROLES, check_page, page_of
from tests.support.servers import CHAT, ROOT, application, page_with_stats

VLLM: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/contract/vllm_metrics.json").read_text())["metrics"]
EXPECTED = {
    f"vllm:{name}"
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
        *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached", "generation_tokens"),
        *("request_success", "request_prompt_tokens", "request_generation_tokens", "time_to_first_token_seconds"),
        *("inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_inference_time_seconds", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    )
}
UNITS = re.compile(
    r"_(ms|milliseconds|micros\w*|ns|minutes|hours|kb|mb|gb|kib|mib|gib|kilobytes|megabytes|percent)(_|$)"
)
PREFIXES = ("trtllm_", "trellis_", "http_")


@pytest.mark.parametrize("role", ROLES)
async def test_names_follow_the_conventions(role: str) -> None:
    """Base units, a prefix, `_total` for counters alone, a help that is a phrase of its own, no `_created` series."""
    for family in text_string_to_metric_families(page := await page_of(role)):
        assert family.name.startswith(PREFIXES), family.name
        assert not UNITS.search(family.name), family.name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name)
        assert family.documentation[:1].isupper() or family.documentation[:1].isdigit(), family.name
        assert not re.match(r"(Their|Those|These|Them|It)\b", family.documentation), family.documentation
        if family.type == "histogram":
            assert re.search(r"_(seconds|bytes|tokens|rate)$", family.name), family.name
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples), family.name
        else:
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")), family.name
        if family.name.endswith("_seconds") and family.type == "histogram":
            assert family.documentation.startswith(("Seconds", "Duration", "Latency")), family.name
    assert "_created" not in page


async def test_buckets_reach_the_longest_request_and_tell_common_times_apart() -> None:
    async with application() as (client, _):
        await client.post("/v1/chat/completions", json=CHAT)
        page = (await client.get("/metrics")).text
    bounds = bounds_of(page)
    longest = Limits.request_timeout_seconds
    for name in (
        "trtllm_time_to_first_token_seconds",
        "trtllm_e2e_request_latency_seconds",
        "trtllm_request_queue_time_seconds",
        "http_request_duration_highr_seconds",
    ):
        assert bounds[name][-1] == longest, name
        assert {60, 120, 300} <= set(bounds[name]), name
        steps = [after / before for before, after in pairwise(bounds[name]) if before >= 0.05]
        assert max(steps) <= 2.5, f"{name} has a gap"
    between = bounds["trtllm_inter_token_latency_seconds"]
    fine = [after / before for before, after in pairwise(between) if 0.003 <= before < 0.3]
    assert max(fine) <= 1.51, "a CPU's and a GPU's times between tokens are told apart"


async def test_vllms_names_are_those_of_its_source() -> None:
    async with application(vllm_metrics=True) as (client, _):
        await client.post("/v1/chat/completions", json=CHAT)
        page = await page_with_stats(client)
    check_page(page)
    families = {family.name: family for family in text_string_to_metric_families(page)}
    theirs = {name: family for name, family in families.items() if name.startswith("vllm:")}
    assert theirs.keys() == EXPECTED
    for name, family in theirs.items():
        known = VLLM[name]
        assert family.type == known["type"], name
        assert family.samples, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(known["labels"]), name
        bounds = bounds_of(page).get(name, [])
        assert {bound for bound in known.get("buckets", ()) if bound <= Limits.request_timeout_seconds} <= set(bounds)
    (prompt,) = families["trtllm_prompt_tokens"].samples
    (queries,) = theirs["vllm:prefix_cache_queries"].samples
    assert queries.name == "vllm:prefix_cache_queries_total" and queries.value == prompt.value > 0
    finished = {sample.labels["finished_reason"]: sample.value for sample in theirs["vllm:request_success"].samples}
    assert finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    (count,) = (s for s in theirs["vllm:request_decode_time_seconds"].samples if s.name.endswith("_count"))
    assert count.value == 1


async def test_vllms_names_are_absent_unless_asked_for() -> None:
    async with application() as (client, _):
        assert "vllm:" not in (await client.get("/metrics")).text


def bounds_of(page: str) -> dict[str, list[float]]:
    """Upper bounds of the buckets of each histogram, without infinity."""
    return {
        family.name: sorted({float(s.labels["le"]) for s in family.samples if s.labels.get("le", "+Inf") != "+Inf"})
        for family in text_string_to_metric_families(page)
        if family.type == "histogram"
    }
