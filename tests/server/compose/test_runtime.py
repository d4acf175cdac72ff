"""Facts of a running replica: /v1/models and /server_info, without secrets."""

from typing import Any

import openai
import pytest

from server.compose.runtime import shown_settings
from server.settings import Settings
from tests.support.servers import application

SECRET = "s3cr3t"


async def test_runtime_is_what_the_engine_has() -> None:
    async with application(
        max_batch_size=7, max_seq_len=512, publish_kv_events=True, kv_events_endpoint="tcp://127.0.0.1:50571"
    ) as (
        client,
        state,
    ):
        info = state["replica"].engine.info
        runtime = (await client.get("/v1/models")).json()["data"][0]["runtime"]
        assert runtime == (await client.get("/v1/models/fake")).json()["runtime"]
        answer = (await client.get("/server_info")).json()
    assert answer["runtime"] == runtime
    assert (answer["model"], answer["ready"], answer["settings"]["max_batch_size"]) == ("fake", True, 7)
    assert {name: runtime[name] for name in ("context_length", "max_num_seqs", "role", "backend")} == {
        "context_length": 512,
        "max_num_seqs": 7,
        "role": "aggregated",
        "backend": "fake",
    }
    assert (runtime["kv_block_size"], runtime["total_kv_blocks"]) == (info.block_size, info.num_blocks)
    assert (runtime["max_num_batched_tokens"], runtime["data_parallel_size"]) == (
        info.max_num_tokens,
        info.data_parallel_size,
    )
    assert (runtime["kv_events_port"], runtime["kv_events_replay_port"], runtime["peers"]) == (50571, None, {})
    assert (runtime["tool_call_parser"], runtime["reasoning_parser"]) == ("hermes", None)
    assert runtime["refused_parameters"] == {}
    assert {"trellis", "python"} <= runtime["versions"].keys()


SECRETIVE: dict[str, dict[str, Any]] = {
    "decode": {
        "prefill_urls": f"http://{SECRET}:9",
        "encode_urls": f"http://{SECRET}:8",
    },
    "prefill": {},
    "encode": {},
}


@pytest.mark.parametrize("role", SECRETIVE)
async def test_server_info_of_every_role_behind_the_key_and_without_secrets(role: str) -> None:
    settings = {
        "internal_secret": SECRET,
        "api_keys": f"{SECRET},k",
        "override_engine_args": f'{{"x": "{SECRET}"}}',
        **SECRETIVE[role],
    }
    async with application(False, disaggregation_mode=role, **settings) as (client, _):
        assert (await client.get("/server_info")).status_code == 401
        for _ in range(2):
            answer = await client.get("/server_info", headers={"authorization": "Bearer k"})
            assert answer.status_code == 200, "while it starts, too"
    assert SECRET not in answer.text
    found = answer.json()
    assert found["runtime"]["role"] == role
    assert (
        found["settings"]["api_keys"]
        == found["settings"]["internal_secret"]
        == found["settings"]["override_engine_args"]
        == "***"
    )


async def test_peers_are_counted() -> None:
    here = {
        "disaggregation_mode": "decode",
        "internal_secret": "s",
        "prefill_urls": "http://127.0.0.1:9,http://127.0.0.1:19",
    }
    async with application(**here) as (client, _):
        assert (await client.get("/server_info")).json()["runtime"]["peers"] == {
            "prefill": {"known": 2, "available": 0}
        }


def test_no_setting_shows_a_secret() -> None:
    """Whatever a setting is named: those of secrets, addresses of others, and parts of addresses that are secrets."""
    settings = Settings(
        engine="trtllm",
        api_keys=SECRET,
        internal_secret=SECRET,
        prefill_urls=f"http://{SECRET}:1",
        encode_urls=f"http://{SECRET}:1",
        nats_url=f"nats://user:{SECRET}@host:4222",
        otel_endpoint=f"http://user:{SECRET}@collector:4318/v1?key={SECRET}",
        override_engine_args=f'{{"token": "{SECRET}"}}',
        engine_address=f"tcp://{SECRET}:1",
        route_urls=f"http://{SECRET}:1",
    )
    shown = shown_settings(settings)
    assert SECRET not in str(shown)
    assert shown["otel_endpoint"] == "http://collector:4318/v1"
    assert shown.keys() == Settings.model_fields.keys()
    assert shown_settings(Settings())["api_keys"] == ""


async def test_openais_client_gets_it_too() -> None:
    async with (
        application() as (http, _),
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client,
    ):
        (model,) = (await client.models.list()).data
    assert model.model_extra is not None
    assert model.model_extra["runtime"]["total_kv_blocks"] > 0
