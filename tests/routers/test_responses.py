"""Responses over HTTP: a scripted fake engine writes, clients read, whole, streamed and from the background."""

import asyncio
import json
import re
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent

from engine.errors import EngineFailure
from engine.fake.engine import FakeEngine
from routers.database import StoreUnavailable
from routers.responses import convert
from routers.responses.routes import ENDPOINT
from routers.responses.store import Record, SqliteStore
from tests.routers.proxy.test_http import available
from tests.support.disaggregated import replica
from tests.support.routing import router
from tests.support.servers import ServerThread, application
from tests.support.waiting import slowness

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SHELL: dict[str, Any] = {"type": "custom", "name": "shell", "description": "Run a command"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
COMMAND = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a\\"\\n\\u00e9\\ud83d\\ude42"}}\n</tool_call>'
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseItem)
ABORTED = 'trtllm_num_aborted_requests_total{model_name="fake"} 1.0'


@asynccontextmanager
async def served(folder: Path, *answers: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that stores responses, and whose model gives these answers in turn."""
    given: dict[str, Any] = {"cache_dir": folder, "responses_store_mb": 64, **settings}
    if answers:
        given["fake_script"] = folder / "script.json"
        given["fake_script"].write_text(json.dumps(answers))
    async with application(**given) as (client, _):
        yield client


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The response, as the SDK's type allows it."""
    answer = await client.post(PATH, json={"input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    return dict(answer.json())


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, as the SDK's types allow them, numbered one after the other."""
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks.pop() == "data: [DONE]", text[-200:]
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return events


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    return events_of((await client.post(PATH, json={"input": "hi", "stream": True, **fields})).text)


def types(items: list[dict[str, Any]]) -> list[str]:
    return [item["type"] for item in items]


def check_adds_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response; all that came before it is what it has."""
    response: dict[str, Any] = events[-1]["response"]
    assert types(events[:2]) == ["response.created", "response.in_progress"]
    opened = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert opened == [item["id"] for item in response["output"]]
    assert done == response["output"]
    for item in response["output"]:
        deltas = "".join(event["delta"] for event in events if event.get("item_id") == item["id"] and "delta" in event)
        match item["type"]:
            case "function_call":
                assert deltas == item["arguments"]
            case "custom_tool_call":
                assert deltas == item["input"]
            case _:
                assert deltas == "".join(part["text"] for part in item["content"])
    return response


async def test_text_and_calls_whole_and_streamed(tmp_path: Path) -> None:
    tools = {"tools": [WEATHER, SHELL]}
    async with served(tmp_path, f"Let me look.\n{CALL}\n{COMMAND}") as client:
        whole = await ask(client, **tools)
        events = await stream(client, **tools)
    response = check_adds_up(events)
    for found in (whole, response):
        assert types(found["output"]) == ["message", "function_call", "custom_tool_call"]
        text, call, command = found["output"]
        assert text["content"][0]["text"] == "Let me look."
        assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Paris"}')
        assert (command["name"], command["input"]) == ("shell", 'ls "a"\né🙂')
        assert len({item["id"] for item in found["output"]}) == 3
        assert found["status"] == "completed" and found["completed_at"]
    assert whole["usage"]["total_tokens"] == response["usage"]["total_tokens"]
    pieces = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 10, "the arguments come as they are written"


async def test_tools_of_a_namespace(tmp_path: Path) -> None:
    space = {"type": "namespace", "name": "paris", "description": "The city", "tools": [WEATHER, SHELL]}
    calls = CALL.replace("get_weather", "paris__get_weather") + COMMAND.replace("shell", "paris__shell") + CALL
    async with served(tmp_path, calls, "Yes.") as client:
        response = check_adds_up(await stream(client, tools=[WEATHER, space]))
        named = [(item["type"], item.get("namespace"), item["name"]) for item in response["output"]]
        assert named == [
            ("function_call", "paris", "get_weather"),
            ("custom_tool_call", "paris", "shell"),
            ("function_call", None, "get_weather"),
        ]
        assert types(response["tools"]) == ["function", "namespace"]
        given = {"input": response["output"], "tools": [WEATHER, space]}
        prompt = (await client.post(f"{PATH}/input_tokens", json=given)).json()["input_tokens"]
        flat = [item | {"namespace": None} for item in response["output"]]
        shorter = (await client.post(f"{PATH}/input_tokens", json=given | {"input": flat})).json()["input_tokens"]
        assert prompt == shorter + 2 * len("paris__")
        wrong = space | {"tools": [WEATHER, WEATHER]}
        refused = await client.post(PATH, json={"input": "hi", "tools": [wrong]})
        assert refused.json()["error"]["param"] == "tools.0.tools.1.name"


async def test_reasoning_and_what_seals_it(tmp_path: Path) -> None:
    given = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    async with served(tmp_path, "<think>\nHm, well.\n</think>\n\nYes.", "Yes.", **given) as client:
        response = check_adds_up(await stream(client, include=["reasoning.encrypted_content"], store=False))
        reasoning, text = response["output"]
        assert (reasoning["content"][0]["text"], text["content"][0]["text"]) == ("Hm, well.", "Yes.")
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        sealed = {"type": "reasoning", "id": reasoning["id"], "summary": []}
        sealed["encrypted_content"] = reasoning["encrypted_content"]
        await ask(client, input=[sealed, text, {"role": "user", "content": "Sure?"}])
        short = await ask(client, thinking_token_budget=4)
        assert [item["content"][0]["text"] for item in short["output"]] == ["Hm,", "Yes."]
        assert short["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
        foreign = await client.post(PATH, json={"input": [sealed | {"encrypted_content": "gAAAA"}]})
        assert foreign.json()["error"]["param"] == "input.0.encrypted_content"


async def test_an_answer_that_is_cut_is_incomplete(tmp_path: Path) -> None:
    async with served(tmp_path, CALL, "A long story.") as client:
        cut = await ask(client, tools=[WEATHER], max_output_tokens=60, stream=False)
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        events = await stream(client, max_output_tokens=3)
        response = check_adds_up(events)
        assert events[-1]["type"] == "response.incomplete"
        assert response["output"][0]["status"] == "incomplete"


async def test_log_probabilities_of_text(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        events = await stream(client, top_logprobs=2, max_output_tokens=5)
        (item,) = check_adds_up(events)["output"]
        entries = item["content"][0]["logprobs"]
        assert len(entries) == 5 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert entries == [entry for event in events if "delta" in event for entry in event["logprobs"]]


async def test_responses_are_continued_read_and_deleted(tmp_path: Path) -> None:
    async with served(tmp_path, CALL, "Sunny.", "Warm.") as client:
        first = await ask(client, input="How is Paris?", tools=[WEATHER], instructions="Be brief.")
        call = first["output"][0]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21 degrees"}
        second = await ask(client, input=[result], previous_response_id=first["id"], tools=[WEATHER])
        assert second["output"][0]["content"][0]["text"] == "Sunny."
        assert second["previous_response_id"] == first["id"]
        messages = [  # instructions are not carried on
            {"role": "user", "content": "How is Paris?"},
            {"role": "assistant", "content": "", "tool_calls": [_call(call)]},
            {"role": "tool", "tool_call_id": call["call_id"], "content": "21 degrees"},
        ]
        chat = await client.post("/v1/tokenize", json={"messages": messages, "tools": [_chat_tool(WEATHER)]})
        assert second["usage"]["input_tokens"] == chat.json()["count"]

        stored = await client.get(f"{PATH}/{first['id']}")
        assert stored.json() == first
        page = (await client.get(f"{PATH}/{second['id']}/input_items", params={"limit": 2, "order": "asc"})).json()
        for item in page["data"]:
            ITEM.validate_python(item)
        assert types(page["data"]) == ["message", "function_call"] and page["has_more"]
        rest = (
            await client.get(f"{PATH}/{second['id']}/input_items", params={"after": page["last_id"], "order": "asc"})
        ).json()
        assert types(rest["data"]) == ["function_call_output"] and not rest["has_more"]

        reference = {"type": "item_reference", "id": second["output"][0]["id"]}
        await ask(client, input=[reference, {"role": "user", "content": "Sure?"}])
        assert (await client.delete(f"{PATH}/{first['id']}")).json()["deleted"]
        for gone in (client.get(f"{PATH}/{first['id']}"), client.delete(f"{PATH}/{first['id']}")):
            answer = await gone
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        broken = await client.post(PATH, json={"input": "hi", "previous_response_id": second["id"]})
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "previous_response_not_found")
        left = (await client.get(f"{PATH}/{second['id']}/input_items")).json()
        assert types(left["data"]) == ["function_call_output"]


def _call(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


async def test_a_conversation_goes_on_where_it_ended(tmp_path: Path) -> None:
    async with served(tmp_path, "One.", "Two.", "Three.", "Four.") as client:
        first = await ask(client, conversation="conv_a")
        second = await ask(client, conversation={"id": "conv_a"}, stream=False)
        other = await ask(client, conversation="conv_b")
        items = (await client.get(f"{PATH}/{second['id']}/input_items")).json()["data"]
        await client.delete(f"{PATH}/{second['id']}")
        again = await ask(client, conversation="conv_a")
        assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        await client.delete(f"{PATH}/{first['id']}")
        error = (await client.post(PATH, json={"input": "hi", "conversation": "conv_a"})).json()["error"]
        assert (error["param"], error["code"]) == ("conversation", "previous_response_not_found")
        assert first["id"] in error["message"]
    assert second["conversation"] == {"id": "conv_a"}
    assert types(items) == ["message"] * 3
    assert first["usage"]["input_tokens"] == other["usage"]["input_tokens"] < second["usage"]["input_tokens"]


async def test_a_key_sees_only_its_own(tmp_path: Path) -> None:
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
    async with served(tmp_path, "Yes.", api_keys="mine,theirs") as client:
        made = (await client.post(PATH, json={"input": "hi", "conversation": "c"}, headers=mine)).json()
        path = f"{PATH}/{made['id']}"
        assert (await client.get(path, headers=mine)).status_code == 200
        assert (await client.get(path, headers={"x-api-key": "mine"})).status_code == 200
        for method, where in (
            ("GET", path),
            ("GET", f"{path}/input_items"),
            ("DELETE", path),
            ("POST", f"{path}/cancel"),
        ):
            assert (await client.request(method, where, headers=theirs)).status_code == 404
        body = {"input": "hi", "previous_response_id": made["id"]}
        assert (await client.post(PATH, json=body, headers=theirs)).status_code == 400
        again = (await client.post(PATH, json={"input": "hi", "conversation": "c"}, headers=theirs)).json()
        assert again["usage"]["input_tokens"] == made["usage"]["input_tokens"]
    kept = b"".join(file.read_bytes() for file in tmp_path.glob("responses.sqlite3*"))  # noqa: ASYNC240
    assert made["id"].encode() in kept and b"mine" not in kept


async def test_stored_responses_survive_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path, "Yes.") as client:
        made, hidden = await ask(client), await ask(client, store=False)
    async with served(tmp_path, "Yes.") as client:
        assert (await client.get(f"{PATH}/{made['id']}")).json() == made
        assert (await client.get(f"{PATH}/{hidden['id']}")).status_code == 404
        await ask(client, previous_response_id=made["id"])


async def test_without_a_store_responses_say_so() -> None:
    async with application(responses_store_mb=0) as (client, _):
        assert (await ask(client, max_output_tokens=4))["store"] is False
        assert check_adds_up(await stream(client, max_output_tokens=4))["store"] is False
        for fields in ({"background": True}, {"conversation": "c"}):
            answer = await client.post(PATH, json={"input": "hi", **fields})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_a_store_that_fails_does_not_lose_the_answer(tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite3").write_text("this is no database, and long enough to be looked at" * 100)
    async with served(tmp_path, "Yes.") as client:
        assert (await ask(client))["store"] is False
        assert check_adds_up(await stream(client))["store"] is False
        assert (await client.get(f"{PATH}/resp_1")).status_code == 503


async def test_calls_wait_together_for_a_locked_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "responses.sqlite3", 1 << 20, 100.0)
    await store.get("", "resp_1")
    monkeypatch.setattr("routers.database._PATIENCE", 0.2)
    with closing(sqlite3.connect(tmp_path / "responses.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        found = await asyncio.gather(*(store.get("", "resp_1") for _ in range(20)), return_exceptions=True)
        assert time.monotonic() - begun < 2 * slowness(), "not 20 times as long as one"
        assert {type(error) for error in found} == {StoreUnavailable}
    assert await store.get("", "resp_1") is None
    await store.close()


async def test_background_responses_are_polled_and_followed(tmp_path: Path) -> None:
    async with served(tmp_path, "Yes, well.") as client:
        queued = await ask(client, background=True)
        assert queued["status"] == "queued"
        path = f"{PATH}/{queued['id']}"
        events = events_of((await client.get(path, params={"stream": True})).text)
        assert types(events[:3]) == ["response.created", "response.queued", "response.in_progress"]
        done = (await client.get(path)).json()
        assert done == events[-1]["response"] and done["status"] == "completed"
        rest = events_of((await client.get(path, params={"stream": True, "starting_after": 4})).text)
        assert rest == events[5:]
        for after in (len(events) - 1, len(events) + 1):
            over = await client.get(path, params={"stream": True, "starting_after": after})
            assert over.json()["error"]["param"] == "starting_after"
        streamed = await stream(client, background=True)
        assert check_adds_up([streamed[0], *streamed[2:]])["background"] is True
        assert (await client.post(f"{path}/cancel")).json() == done, "it had ended before"
        plain = await ask(client)
        for refused in (
            client.post(f"{PATH}/{plain['id']}/cancel"),
            client.get(f"{PATH}/{plain['id']}", params={"stream": True}),
        ):
            assert (await refused).status_code == 400


async def test_another_process_follows_and_cancels_what_runs_in_the_background(tmp_path: Path) -> None:
    async with served(tmp_path, fake_token_delay_ms=20) as runs, served(tmp_path) as other:
        made = await ask(runs, background=True, max_output_tokens=20_000)
        path = f"{PATH}/{made['id']}"
        following = asyncio.create_task(other.get(path, params={"stream": True}))
        async with asyncio.timeout(20 * slowness()):
            while (await other.get(path)).json()["status"] != "in_progress":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await other.post(f"{path}/cancel")).json()["status"] == "cancelled"
            events = events_of((await following).text)
        assert events[-1]["response"] == (await runs.get(path)).json()


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_background_responses_can_be_ended(how: str, tmp_path: Path) -> None:
    async with served(tmp_path, fake_token_delay_ms=20) as client:
        made = await ask(client, background=True, max_output_tokens=20_000)
        path = f"{PATH}/{made['id']}"
        following = asyncio.create_task(client.get(path, params={"stream": True}))
        async with asyncio.timeout(20 * slowness()):
            while (await client.get(path)).json()["status"] != "in_progress":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if how == "cancel":
                cancelled = (await client.post(f"{path}/cancel")).json()
                Response.model_validate(cancelled)
                assert cancelled["status"] == "cancelled"
            else:
                await client.delete(path)
            assert types(events_of((await following).text))[-1] in ("response.incomplete", "response.failed")
            while ABORTED not in (await client.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_shutdown_waits_for_the_background_and_then_fails_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        settings = {"cache_dir": tmp_path, "responses_store_mb": 64, "fake_token_delay_ms": 20}
        client, state = await stack.enter_async_context(application(**settings))
        made = await ask(client, background=True, max_output_tokens=20_000)
        assert state["replica"].running == 1
        await state["replica"].service.close()
        assert state["replica"].running == 0
    async with served(tmp_path, "x") as client:
        found = (await client.get(f"{PATH}/{made['id']}")).json()
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


async def test_a_response_whose_process_died_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path, "x") as client:
        made = await ask(client, background=True)
        await client.get(f"{PATH}/{made['id']}", params={"stream": True})
        store = SqliteStore(tmp_path / "responses.sqlite3", 1 << 20, 100.0)
        record = await store.get("", made["id"])
        assert record is not None
        await store.put(type(record)(**{**_fields(record), "status": "in_progress"}))
        await store.close()
        monkeypatch.setattr("routers.responses.service.STALE_SECONDS", 0.0)
        assert (await client.get(f"{PATH}/{made['id']}")).json()["status"] == "failed"


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


async def test_a_failure_midway_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = ENDPOINT.shape.stream

    def failing(self: Any, piece: Any) -> list[bytes]:
        if self.numbers > 6:
            raise EngineFailure("the engine is broken")
        return follow(self, piece)

    async with served(tmp_path, "A long story.") as client:
        monkeypatch.setattr(ENDPOINT.shape, "stream", failing)
        events = await stream(client)
        response = check_adds_up(events)
        assert events[-1]["type"] == "response.failed"
        assert response["error"] == {"code": "server_error", "message": "The engine is broken"}
        assert (await client.get(f"{PATH}/{response['id']}")).json() == response
        made = await ask(client, background=True)
        last = events_of((await client.get(f"{PATH}/{made['id']}", params={"stream": True})).text)[-1]
        assert last["response"]["error"] == response["error"]


async def test_a_client_that_leaves_aborts_its_request(tmp_path: Path) -> None:
    settings = {"cache_dir": tmp_path, "responses_store_mb": 64, "fake_token_delay_ms": 20}
    with ServerThread(**settings) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            body = {"input": "hi", "stream": True, "max_output_tokens": 20_000}
            async with client.stream("POST", PATH, json=body) as answer:
                await anext(answer.aiter_lines())
            async with asyncio.timeout(10 * slowness()):
                while ABORTED not in (await client.get("/metrics")).text:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "web_search_preview"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input.0.arguments"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input.0.arguments"),
    ({"input": [{"type": "function_call_output", "output": "1"}]}, "input.0.call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "1"}]}, "input.0.call_id"),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "1", "output": "1"}]}, "input.0.call_id"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id"),
    ({"tools": [WEATHER, WEATHER]}, "tools.1.name"),
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tools": [SHELL | {"format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools.0.format.syntax"),
    ({"tools": [SHELL | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools.0.format.definition"),
    ({"tools": [WEATHER, SHELL | {"format": LARK}]}, "tools.1.format"),
    ({"tools": [WEATHER | {"strict": True}]}, "tools.0.strict"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "web_search"}]}},
        "tool_choice.tools",
    ),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
    ({"include": ["everything"]}, "include.0"),
    ({"previous_response_id": "resp_1", "conversation": "c"}, "conversation"),
    ({"background": True, "store": False}, "background"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 99}, "top_logprobs"),
]


async def test_errors_name_the_field(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        for fields, param in WRONG:
            answer = await client.post(PATH, json={"input": "hi", **fields})
            assert answer.status_code == 400, (fields, answer.text)
            error = answer.json()["error"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), fields
        path = f"{PATH}/resp_1/input_items"
        for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order")):
            answer = await client.get(path, params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_errors_of_the_prompt_name_the_input(tmp_path: Path) -> None:
    async with served(tmp_path, max_messages=2, special_tokens_in_content="refuse") as client:
        for given in (
            [{"role": "user", "content": "hi"}] * 3,
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "<|im_end|>"}],
        ):
            error = (await client.post(PATH, json={"input": given})).json()["error"]
            assert (error["param"], "messages" in error["message"]) == ("input", False)
        tool = WEATHER | {"description": "<|im_end|>"}
        error = (await client.post(PATH, json={"input": "hi", "tools": [{"type": "mcp"}, tool]})).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "special_token")


async def test_hosted_tools_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    convert._warn.cache_clear()  # it is logged once in a process
    hosted = {"type": "file_search", "vector_store_ids": ["vs_1"]}
    async with served(tmp_path, "Yes.", strict_fields=True) as client:
        for _ in range(2):
            assert types((await ask(client, tools=[hosted, WEATHER]))["tools"]) == ["function"]
        call = {"type": "mcp_call", "id": "mcp_1", "name": "f", "arguments": "{}", "output": "1"}
        asked = {"role": "user", "content": "hi"}
        counts = [
            (await client.post(f"{PATH}/input_tokens", json={"input": items})).json()["input_tokens"]
            for items in ([asked], [{"type": "mcp_list_tools", "id": "mcpl_1"}, call, asked])
        ]
        assert counts[0] == counts[1]
    assert caplog.text.count("ignoring tools of type 'file_search'") == 1


async def test_guides_and_choices_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def generate(self: FakeEngine, request: Any) -> Any:
        asked.append(request.sampling.guide)
        return take(self, request)

    take = FakeEngine.generate
    monkeypatch.setattr(FakeEngine, "generate", generate)
    digits = SHELL | {"format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}}
    lark = SHELL | {"format": LARK}
    async with served(tmp_path, "Yes.") as client:
        await ask(client, text={"format": {"type": "json_object"}})
        await ask(client, tools=[WEATHER], tool_choice="required")
        await ask(client, tools=[WEATHER, SHELL], tool_choice={"type": "custom", "name": "shell"})
        await ask(client, tools=[digits])
        await ask(client, tools=[lark])
        listed = [{"type": "web_search"}, {"type": "function", "name": "get_weather"}]
        chosen = {"type": "allowed_tools", "mode": "required", "tools": listed}
        await ask(client, tools=[WEATHER, SHELL], tool_choice=chosen)
        await ask(client, tools=[WEATHER], tool_choice="none")
    kinds = [guide.kind if guide is not None else None for guide in asked]
    tag = "structural_tag"
    assert kinds == ["json_object", tag, tag, tag, tag, tag, None]
    specs = [guide.spec if guide is not None else "" for guide in asked]
    assert "get_weather" in specs[1] and "get_weather" not in specs[2] and "shell" not in specs[5]
    for spec, form in ((specs[3], digits["format"]), (specs[4], LARK)):
        text = {"type": "text_grammar", "syntax": form["syntax"], "definition": form["definition"], "json": True}
        assert json.dumps(text) in spec and '"pattern"' not in spec


async def test_truncation_drops_the_oldest_items(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": "Be kind."}]
    for turn in range(40):
        messages += [{"role": "user", "content": f"{turn:04}" * 500}, {"role": "assistant", "content": "Yes."}]
    messages += [{"role": "user", "content": "Well?"}]
    async with served(tmp_path, "Yes.") as client:
        refused = await client.post(PATH, json={"input": messages})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        fitted = await ask(client, input=messages, truncation="auto")
        kept = (await client.post(f"{PATH}/input_tokens", json={"input": messages[:1] + messages[-33:]})).json()
        more = (await client.post(f"{PATH}/input_tokens", json={"input": messages[:1] + messages[-35:]})).json()
    assert fitted["usage"]["input_tokens"] == kept["input_tokens"] <= 32768 < more["input_tokens"]


async def test_compaction_gives_the_next_input(tmp_path: Path) -> None:
    async with served(tmp_path, "They met in Rome.", "Yes.") as client:
        talk = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In Rome."}]
        answer = (await client.post(f"{PATH}/compact", json={"input": talk})).json()
        assert answer["object"] == "response.compaction" and answer["usage"]["output_tokens"]
        assert types(answer["output"]) == ["message", "compaction"]
        told = [*answer["output"], {"role": "user", "content": "Who?"}]
        spelled = [
            talk[0],
            {"role": "user", "content": "Summary of the conversation before this message:\nThey met in Rome."},
        ]
        counts = [
            (await client.post(f"{PATH}/input_tokens", json={"input": given})).json()["input_tokens"]
            for given in (told, [*spelled, told[-1]])
        ]
        assert counts[0] == counts[1]
        await ask(client, input=told)


async def test_every_kind_of_input_is_compacted(tmp_path: Path) -> None:
    """The order to summarise comes last, however the conversation is given."""
    async with served(tmp_path, "Hello.") as client:
        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
        made = await ask(client)

        async def tokens(**fields: Any) -> int:
            return int((await client.post(f"{PATH}/compact", json=fields)).json()["usage"]["input_tokens"])

        assert await tokens(input="hi") == await tokens(input=talk[:1])
        assert await tokens(previous_response_id=made["id"]) == await tokens(input=talk)
        assert (await client.post(f"{PATH}/compact", json={})).json()["error"]["param"] == "input"


async def test_items_that_a_request_refers_to_are_bounded(tmp_path: Path) -> None:
    async with served(tmp_path, "Yes.", max_body_mb=0.02) as client:
        mine = await ask(client, input="y" * 6000)
        (item,) = (await client.get(f"{PATH}/{mine['id']}/input_items")).json()["data"]
        reference = {"type": "item_reference", "id": item["id"]}
        await ask(client, input=[reference] * 3)
        refused = (await client.post(PATH, json={"input": [reference] * 4})).json()["error"]
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input.3.id")
        for _ in range(2):
            mine = await ask(client, input="y" * 6000, previous_response_id=mine["id"])
        refused = (await client.post(PATH, json={"input": "y", "previous_response_id": mine["id"]})).json()["error"]
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "previous_response_id")


async def test_a_background_response_has_ended_when_its_last_event_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = SqliteStore.append
    found: list[str] = []

    async def watched(self: SqliteStore, response: str, first: int, events: Any, *more: Any) -> bool:
        goes_on = await append(self, response, first, events, *more)
        if any(json.loads(event)["type"] == "response.completed" for event in events):
            record = await self.get("", response)
            assert record is not None
            found.append(record.status)
        return goes_on

    monkeypatch.setattr(SqliteStore, "append", watched)
    async with served(tmp_path, "Yes.") as client:
        await stream(client, background=True)
        assert found == ["completed"]


async def test_the_store_is_bounded_in_size_and_age(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    store = SqliteStore(path, 1 << 20, 100.0)
    now = time.time()
    for number in range(80):
        record = Record(f"resp_{number}", "me", now + number, "completed", False, None, "c", b"{}", b"x" * 20_000)
        await store.put(record)
    found = [await store.get("me", f"resp_{number}") is not None for number in range(80)]
    assert found == sorted(found) and 46 <= sum(found) <= 56
    assert await store.last("me", "c") == "resp_79" and await store.last("you", "c") is None
    await store.close()
    old = SqliteStore(path, 1 << 20, 0.0)
    assert await old.get("me", "resp_0") is None and await old.last("me", "c") == "resp_79"
    await old.put(Record("resp_new", "me", now, "completed", False, None, None, b"{}", b"[]"))
    await old.close()
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_router_finds_the_replica_that_has_a_response(tmp_path: Path) -> None:
    """Each replica has a store of its own. A second router has seen no answer, and may ask one replica for others."""
    async with AsyncExitStack() as stack:
        urls, last = [], AsyncExitStack()
        for number in range(3):
            settings = {"cache_dir": tmp_path / str(number), "responses_store_mb": 64}
            of = last if number == 2 else stack
            urls.append((await of.enter_async_context(replica("aggregated", **settings)))[0])
        clients = []
        for _ in range(2):
            url, life = await stack.enter_async_context(router(urls, route_policy="round_robin", route_attempts=1))
            await available(life, 3)
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=10)))
        client, other = clients
        answers = [await client.post(PATH, json={"input": "hi", "max_output_tokens": 4}) for _ in range(6)]
        at = {answer.json()["id"]: answer.headers["x-trellis-replica"] for answer in answers}
        assert set(at.values()) == {"0", "1", "2"}
        for answer in answers[:4]:
            one = answer.json()
            for asking in clients:
                assert (await asking.get(f"{PATH}/{one['id']}")).json() == one
            events = await stream(client, max_output_tokens=4, previous_response_id=one["id"])
            made = check_adds_up(events)
            item = {"type": "item_reference", "id": made["output"][0]["id"]}
            for path, body in (
                (PATH, {"previous_response_id": made["id"]}),
                (PATH, {"input": [item, {"role": "user", "content": "go on"}]}),
                (f"{PATH}/input_tokens", {"previous_response_id": made["id"]}),
            ):
                went_on = await client.post(path, json={"input": "hi", "max_output_tokens": 4, **body})
                assert went_on.headers["x-trellis-replica"] == at[one["id"]], went_on.text
                assert went_on.status_code == 200
            assert (await other.delete(f"{PATH}/{one['id']}")).json()["deleted"]
        assert "trtllm_router_retries_total 0" in (await client.get("/metrics")).text.replace('{model_name="fake"}', "")
        sizes = [
            (await ask(asking, conversation="c", max_output_tokens=4))["usage"]["input_tokens"]
            for asking in (*clients, *clients)
        ]
        assert sizes == sorted(set(sizes)), "both routers take a conversation to the same replica"
        assert (await client.get(f"{PATH}/resp_1")).status_code == 404
        await last.aclose()
        (away,) = (one for one in list(at)[4:] if at[one] == "2")
        answer = await client.get(f"{PATH}/{away}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


async def test_a_decode_replica_serves_both_newer_apis_with_prompts_computed_elsewhere(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        peer, _ = await stack.enter_async_context(replica("prefill"))
        settings = {"prefill_urls": (peer,), "prefill_min_tokens": 0, "cache_dir": tmp_path, "responses_store_mb": 64}
        url, _ = await stack.enter_async_context(replica("decode", **settings))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=10))
        first = await ask(client, max_output_tokens=4)
        events = await stream(client, max_output_tokens=4, previous_response_id=first["id"])
        assert check_adds_up(events)["usage"]["output_tokens"] == first["usage"]["output_tokens"] == 4
        body = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        message = (await client.post("/v1/messages", json=body)).json()
        assert (message["usage"]["output_tokens"], message["stop_reason"]) == (4, "max_tokens")
        page = (await client.get("/metrics")).text
        assert re.search(r'trtllm_prefill_requests_total\{.*outcome="ok".*\} 3\.0', page)


def test_a_relay_s_error_is_an_event() -> None:
    framed = ENDPOINT.framing.event(b'{"error":{"message":"lost","type":"server_error","param":null,"code":"x"}}')
    name, data = framed.decode().strip().split("\n")
    assert name == "event: error"
    EVENT.validate_json(data.removeprefix("data: "))


class Weather(pydantic.BaseModel):
    city: str


def test_the_sdk_streams_parses_and_reads(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([f"Let me look.\n{CALL}", "Sunny.", '{"city": "Paris"}', "Later."]))
    with ServerThread(fake_script=script, cache_dir=tmp_path, responses_store_mb=64, api_keys="key") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)
        tool = openai.pydantic_function_tool(Weather, name="get_weather")["function"]
        tools: Any = [{"type": "function", **{k: v for k, v in tool.items() if k != "strict"}}]
        with client.responses.stream(model="fake", input="How is Paris?", tools=tools) as events:
            kinds = {event.type for event in events}
            final = events.get_final_response()
        assert {"response.output_text.delta", "response.function_call_arguments.delta", "response.completed"} <= kinds
        assert final.output_text == "Let me look."
        call = final.output[1]
        assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
        second = client.responses.create(model="fake", input=[result], previous_response_id=final.id)
        assert second.output_text == "Sunny."
        assert client.responses.retrieve(final.id).output == client.responses.retrieve(final.id).output
        assert next(item.type for item in client.responses.input_items.list(second.id)) == "function_call_output"
        parsed = client.responses.parse(model="fake", input="x", text={"format": {"type": "text"}})
        assert json.loads(parsed.output_text) == {"city": "Paris"}
        late = client.responses.create(model="fake", input="x", background=True)
        with client.responses.stream(response_id=late.id, starting_after=2) as again:
            assert again.get_final_response().output_text == "Later."
        client.responses.delete(final.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(final.id)
        assert client.responses.input_tokens.count(model="fake", input="x").input_tokens > 0
