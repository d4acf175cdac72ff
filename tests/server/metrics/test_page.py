"""The metrics page: well-formed, nothing twice, nothing of a user's choice in it, the same from any process; and what
names its metrics.
"""

import asyncio
import json
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import yaml
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from engine.admission import AdmissionEngine
from engine.config import FakeConfig
from engine.fake.engine import FakeEngine
from engine.process.child import EngineProcess
from engine.stats import InflightBatchingStats, IterationStats, KvCacheStats, SpecDecodingStats, TierStats
from engine.types import EngineInfo, GenerateRequest, Guide, SamplingParams
from multimodal.metrics import GenerationMetrics
from server.health.canary import tiny_image
from server.metrics.engine import stats_metrics
from server.metrics.page import ServerMetrics
from server.metrics.replica import watch_engine_process
from tests.support.servers import CHAT, ROOT, application, page_with_stats, serving

OBSERVABILITY = ROOT / "deploy/observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana/trellis.json").read_text())
(_alerts,) = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
ALERTS: list[dict[str, Any]] = _alerts["rules"]
EVENTS = f"ipc://@trellis-test-{os.getpid()}"
HERE = {"internal_secret": "s", "prefill_urls": "http://127.0.0.1:9", "encode_urls": "http://127.0.0.1:9"}
ROLES: dict[str, dict[str, Any]] = {
    "aggregated": {"publish_kv_events": True, "kv_events_endpoint": EVENTS},
    "prefill": {"internal_secret": "s"},
    "decode": HERE,
    "encode": {"internal_secret": "s"},
    "router": {"route_urls": "http://127.0.0.1:9"},
}
ENGINES = ("aggregated", "prefill", "decode")
"""Roles with an engine that generates text."""


def samples(page: str) -> list[Any]:
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


def check_page(page: str) -> None:
    """Well-formed, each family once with help, each series once."""
    types = Counter(line.split()[2] for line in page.splitlines() if line.startswith("# TYPE "))
    assert types and max(types.values()) == 1
    assert types.keys() == {line.split()[2] for line in page.splitlines() if line.startswith("# HELP ")}
    series = Counter((sample.name, *sorted(sample.labels.items())) for sample in samples(page))
    assert max(series.values()) == 1, series.most_common(1)


async def page_of(role: str, **settings: Any) -> str:
    async with application(role != "router", disaggregation_mode=role, **{**ROLES[role], **settings}) as (client, _):
        if role == "aggregated":
            await client.post("/v1/chat/completions", json=CHAT)
        if role in ENGINES and "modality" not in settings:
            return await page_with_stats(client)
        page = (await client.get("/metrics")).text
        while role == "router" and "trtllm_router_requests" not in page:
            await asyncio.sleep(0.01)
            page = (await client.get("/metrics")).text
        return page


@pytest.mark.parametrize("role", ROLES)
async def test_every_roles_page_is_well_formed_without_duplicates(role: str) -> None:
    page = await page_of(role)
    check_page(page)
    (info,) = [sample for sample in samples(page) if sample.name == "trellis_info"]
    assert (info.labels["role"], info.labels["backend"]) == (role, "none" if role == "router" else "fake")


async def test_values_that_clients_choose_make_no_labels() -> None:
    """Paths, methods, model names, headers and queries make no label: the series are the same before and after,
    whatever comes.
    """
    async with application(served_model_name='a"}\n\\') as (client, _):
        for method in ("GET", "POST"):
            for path in ("/v1/models/x", "/nowhere", "/v1/chat/completions", "/metrics"):
                await client.request(method, path, json=CHAT)
        for path in ("/nowhere", "/metrics", "/v1/models/x", "/v1/chat/completions"):
            await client.request("BREW", path)
        await client.post("/v1/chat/completions", json={**CHAT, "model": "other"})
        before = await page_with_stats(client)
        for number in range(30):
            evil = f"evil{number}"
            headers = {
                "x-request-id": evil,
                "user-agent": evil,
                "host": evil,
                "x-forwarded-for": evil,
                "traceparent": evil,
            }
            for method in ("GET", "POST", evil.upper()):
                for path in (
                    f"/v1/models/{evil}",
                    f"/{evil}",
                    f"/v1/chat/completions?{evil}",
                    "/metrics/..%2f" + evil,
                    "/%0aevil 1",
                ):
                    await client.request(method, path, json={**CHAT, "model": evil, "user": evil}, headers=headers)
        after = (await client.get("/metrics")).text
    check_page(after)
    assert "evil" not in after.lower()
    assert _series(after) == _series(before)
    assert {sample.labels["model_name"] for sample in samples(after) if "model_name" in sample.labels} == {'a"}\n\\'}


def _series(page: str) -> set[tuple[Any, ...]]:
    return {(sample.name, *sorted(sample.labels.items())) for sample in samples(page)}


async def test_both_paths_show_the_page() -> None:
    async with application() as (client, _):
        await page_with_stats(client)
        pages = [(await client.get(path)).text for path in ("/metrics", "/prometheus/metrics")]
    names = [{family.name for family in text_string_to_metric_families(page)} for page in pages]
    assert names[0] == names[1] != set()


async def test_kinds_of_requests_and_their_lengths_are_counted() -> None:
    url = f"data:image/png;base64,{b64encode(tiny_image()).decode()}"
    seen = {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
        "max_tokens": 2,
    }
    async with application() as (client, _):
        for body in (CHAT, seen, {**seen, "n": 2}):
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        page = (await client.get("/metrics")).text
    values = {sample.name: sample.value for sample in samples(page) if sample.name.startswith("trtllm_")}
    assert values["trtllm_request_type_image_total"] == 2, "requests, not choices"
    assert values["trtllm_request_type_structured_output_total"] == 0
    assert values["trtllm_request_prompt_tokens_count"] == values["trtllm_request_generation_tokens_count"] == 4
    assert values["trtllm_request_prompt_tokens_sum"] == values["trtllm_prompt_tokens_total"]
    assert values["trtllm_request_generation_tokens_sum"] == values["trtllm_generation_tokens_total"] == 8 + 3 * 2


def test_requests_with_a_grammar_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = GenerationMetrics(registry, "m")
    for guide in (None, Guide("json_object")):
        metrics.requested(
            GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1, guide=guide))
        )
    assert registry.get_sample_value("trtllm_request_type_structured_output_total", {"model_name": "m"}) == 1


def test_tiers_have_figures_of_their_own() -> None:
    tiers = (TierStats("host", 100, 50, 5, hit_blocks=3, load_seconds=0.5), TierStats("disk", 0, 7, 1, failures=8))
    stats = replace(_stats(1, 0, 0), tiers=tiers)

    class Collector:
        def collect(self) -> Iterator[Metric]:
            return stats_metrics(stats, 0, 0, "m")

    registry = CollectorRegistry()
    registry.register(Collector())
    found = {
        (sample.name, sample.labels["tier"]): sample.value
        for sample in samples(generate_latest(registry).decode())
        if "tier" in sample.labels
    }
    assert found["trtllm_kv_tier_max_bytes", "host"] == 100 and found["trtllm_kv_tier_max_bytes", "disk"] == 0
    assert found["trtllm_kv_tier_hit_blocks_total", "host"] == 3
    assert found["trtllm_kv_tier_load_seconds_total", "host"] == 0.5
    assert found["trtllm_kv_tier_failures_total", "disk"] == 8
    assert len(found) == 20


async def test_steps_and_the_speed_of_transfers() -> None:
    """Each step that is seen counts once, and none before the first; the speed is that of what was read since the
    statistics before.
    """
    metrics = ServerMetrics("m", None)
    engine = _Reported(
        [
            _stats(0, 0, 0),
            _stats(1, 0, 0),
            _stats(1, 0, 0),
            _stats(2, 3_000_000_000, 1.5),
            _stats(3, 3_000_000_000, 1.5),
        ]
    )
    await engine.start()
    try:
        await metrics.watch_engine(AdmissionEngine(engine, 1, 1))
    finally:
        await engine.close()
    values = {sample.name: sample.value for sample in samples(metrics.render().decode()) if "le" not in sample.labels}
    assert values["trtllm_iteration_duration_seconds_count"] == 3
    assert values["trtllm_iteration_duration_seconds_sum"] == pytest.approx(0.03)
    assert values["trtllm_kv_transfer_speed_bytes_per_second"] == 2e9
    assert metrics.iteration == 3


def test_speculation_is_counted_by_position() -> None:
    stats = replace(
        _stats(1, 0, 0.0),
        spec_decoding_stats=SpecDecodingStats(
            num_drafts=9, num_draft_tokens=18, num_accepted_tokens=10, accepted_per_position=(7, 3)
        ),
    )
    found = {
        (sample.name.removeprefix("trtllm_spec_decode_"), sample.labels.get("position")): sample.value
        for metric in stats_metrics(stats, 0.0, 0.0, "m")
        for sample in metric.samples
        if "spec_decode" in sample.name
    }
    accepted = "num_accepted_tokens_per_pos_total"
    assert found == {("num_drafts_total", None): 9, (accepted, "0"): 7, (accepted, "1"): 3}
    assert not [m for m in stats_metrics(_stats(1, 0, 0.0), 0.0, 0.0, "m") if "spec_decode" in m.name]


class _Reported(FakeEngine):
    """An engine that has said this of itself."""

    def __init__(self, said: list[IterationStats]) -> None:
        super().__init__(FakeConfig())
        self._said = said

    async def stats(self) -> AsyncIterator[IterationStats]:
        for one in self._said:
            yield one


def _stats(iteration: int, size: int, seconds: float) -> IterationStats:
    return IterationStats(
        timestamp=0.0,
        iteration=iteration,
        iter_latency_ms=10.0,
        num_active_requests=0,
        num_queued_requests=0,
        num_completed_requests=0,
        max_num_active_requests=1,
        kv_cache_stats=KvCacheStats(max_num_blocks=1, free_num_blocks=1, used_num_blocks=0, tokens_per_block=1),
        inflight_batching_stats=InflightBatchingStats(),
        kv_transfer_bytes=size,
        kv_transfer_latency_seconds=seconds,
    )


@pytest.mark.slow
def test_any_of_several_processes_shows_the_same() -> None:
    with serving(
        *(
            "--api-processes",
            "2",
            "--canary-seconds",
            "0.2",
            "--publish-kv-events",
            "1",
            "--kv-events-endpoint",
            EVENTS,
        ),
        *("--vllm-metrics", "1"),
    ) as server:
        server.wait_metric("trellis_ready", 1)
        with httpx.Client(
            limits=httpx.Limits(max_keepalive_connections=0)
        ) as client:  # each time another connection: any of the processes
            for _ in range(20):
                assert client.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 200
            server.wait_metric("trtllm_request_success_total", 20)
            pages = [client.get(f"{server.url}/metrics").text for _ in range(8)]
            settings = client.get(f"{server.url}/server_info").json()["settings"]
            assert (settings["api_processes"], settings["engine_address"]) == (2, "***")
        for page in pages:
            check_page(page)
            found = {sample.name: sample.value for sample in samples(page)}
            assert (found["trellis_ready"], found["trellis_info"]) == (1, 1)
            assert found["trtllm_request_prompt_tokens_count"] == 20
            assert found["trtllm_kv_event_publisher_up"] == 1
            assert found["vllm:prompt_tokens_total"] == found["trtllm_prompt_tokens_total"] > 0
            assert found["vllm:e2e_request_latency_seconds_count"] == 20
            assert "_created" not in page


async def test_the_dashboard_and_the_docs_name_metrics_that_are_there() -> None:
    parser = pytest.importorskip("promql_parser")
    pages = [*[await page_of(role) for role in ROLES], await page_of("aggregated", modality="visual")]
    there = {sample.name for page in pages for sample in samples(page)} | {
        line.split()[2] for page in pages for line in page.splitlines() if line.startswith("# TYPE ")
    }
    there |= {f"{name}_{part}" for name in there for part in ("bucket", "sum", "count")}
    there |= {"up", "trellis_trace_spans_total"}  # Prometheus' own, and that of replicas with traces
    speculation = ("num_drafts", "num_accepted_tokens_per_pos")  # shown with SPECULATIVE alone
    there |= {f"trtllm_spec_decode_{name}_total" for name in speculation}
    process = ("restarts_total", "takeovers_total", "standby")  # of an engine in a process of its own
    there |= {f"trellis_engine_{name}" for name in process}
    there |= {"trtllm_sleep_level", "trtllm_wake_seconds"}  # of an engine that can sleep
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    queries += [rule["expr"] for rule in ALERTS]
    queries += _queries((ROOT / "docs/observability.md").read_text())
    assert len(queries) > 70
    for query in queries:
        names = set(_selected(parser.parse(query.replace("$__rate_interval", "1m")), parser))
        assert names and names <= there, f"{query}: {names - there}"
    told = set(re.findall(r"`((?:trtllm|trellis|http|event_loop)_\w+)`", (ROOT / "docs/observability.md").read_text()))
    families = {line.split()[2] for page in pages for line in page.splitlines() if line.startswith("# TYPE ")}
    assert told <= there, told - there
    untold = families - told
    assert not untold, f"docs/observability.md says nothing of {sorted(untold)}"


def _queries(text: str) -> list[str]:
    return [
        line
        for block in re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if line.strip()
    ]


def _selected(expression: Any, parser: Any) -> Iterator[str]:
    """Names of the metrics in a parsed query."""
    if isinstance(expression, parser.VectorSelector):
        yield expression.name
    for name in ("vector_selector", "lhs", "rhs", "expr"):
        if (part := getattr(expression, name, None)) is not None:
            yield from _selected(part, parser)
    if isinstance(expression, parser.Call):
        for argument in expression.args:
            yield from _selected(argument, parser)


def test_the_dashboard_is_whole() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    places: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & places, f"{panel['title']} lies over another"
        places |= cells
        assert panel["title"] and panel["description"] and panel["targets"]
        for target in panel["targets"]:
            assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= variables


def test_each_alert_says_what_is_wrong_and_the_docs_what_to_do() -> None:
    text = (ROOT / "docs/production.md").read_text()
    rows = re.findall(r"^\| `(Trellis\w+)` \| \S", text, re.MULTILINE)
    assert rows == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        if grouped := re.findall(r"\bby \(([\w, ]+)\)", rule["expr"]):
            assert named <= set(grouped[0].split(", ")), rule["alert"]
    settings = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    mounted = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    assert f"./deploy/observability/alerts.yml:{settings['rule_files'][0]}:ro" in mounted


def test_compose_mounts_what_there_is() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observability"]
        files = [volume.partition(":")[0] for volume in services[name]["volumes"] if volume.startswith("./")]
        assert files and all((ROOT / file).is_file() for file in files)
    (scrape,) = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())["scrape_configs"]
    (names,) = (found["names"] for found in scrape["dns_sd_configs"])
    replicas = {
        name for name, service in services.items() if "8000" in service.get("expose", []) or name == "tensorrt-llm"
    }
    assert replicas <= set(names), "every replica is scraped"
    source = yaml.safe_load((OBSERVABILITY / "grafana/datasources.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def test_the_dashboards_units_are_those_of_its_metrics() -> None:
    for panel in DASHBOARD["panels"]:
        queries = " ".join(target["expr"] for target in panel.get("targets", []))
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
        if re.search(r"_seconds_(bucket|sum|total)\b", queries):
            assert unit == "s", panel["title"]
        elif "_bytes_per_second{" in queries:
            assert unit == "Bps", panel["title"]
        elif "_bytes{" in queries:
            assert unit == "bytes", panel["title"]
        elif re.search(r"_(rate|utilization)\{", queries) or re.search(r"\) / ", queries):
            assert unit == "percentunit", panel["title"]


def test_the_dashboards_colours_tell_good_from_bad() -> None:
    """Outcomes have colours of their own: failures red, nothing else red, no two alike."""
    good, bad = {"stop", "ok", "2xx"}, {"error", "failed", "5xx", "malformed"}
    for panel in DASHBOARD["panels"]:
        overrides = panel.get("fieldConfig", {}).get("overrides", [])
        colours = {
            override["matcher"]["options"]: entry["value"]["fixedColor"]
            for override in overrides
            for entry in override["properties"]
            if entry["id"] == "color"
        }
        assert len(set(colours.values())) == len(colours), panel["title"]
        for name, colour in colours.items():
            assert (colour == "red") == (name in bad) and (colour == "green" or name not in good), (
                panel["title"],
                name,
            )
        legends = {target.get("legendFormat", "") for target in panel.get("targets", [])}
        named = {override["matcher"]["options"] for override in overrides}
        assert named <= legends or any("{{" in legend for legend in legends), f"{panel['title']}: no such series"


async def test_restarts_and_engines_with_weights_of_their_own_are_counted() -> None:
    metrics = ServerMetrics("m", None)
    process = EngineProcess(FakeConfig())
    watch_engine_process(metrics.polled, process)
    engine = FakeEngine(FakeConfig())
    await engine.start()
    facts = engine.info
    lives = [facts, replace(facts, own_weights="none answers"), facts]

    class Restarted(AdmissionEngine):
        """An engine that is another one at each report."""

        @property
        def info(self) -> EngineInfo:
            return lives[0]

        async def stats(self) -> AsyncIterator[IterationStats]:
            for _ in range(3):
                yield _stats(0, 0, 0.0)
                lives[:-1] = lives[1:]

    async with asyncio.timeout(20):
        await metrics.watch_engine(Restarted(engine, 1, 1.0))
    process.restarts, process.takeovers = 2, 1
    shown = {sample.name: sample.value for sample in samples(metrics.render().decode())}
    assert shown["trtllm_own_weights_total"] == 1
    assert (shown["trellis_engine_restarts_total"], shown["trellis_engine_takeovers_total"]) == (2, 1)
    assert shown["trellis_engine_standby"] == 0
    await engine.close()
    await process.close()
