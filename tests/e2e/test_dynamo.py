"""Replicas as workers of a Dynamo graph: OpenAI's client, Dynamo's own frontend with its KV router, SmolLM2, and
smolvision where prefill and decode are apart.

The graph is found in a folder, asked over TCP and told by ZMQ, so that neither etcd nor NATS is needed. The order of
the tests matters: the last ones end replicas.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.process.sockets import free_port
from tests.support.pictures import message, number, shape
from tests.support.servers import ServerProcess
from tests.support.waiting import slowness

if importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo.frontend") is None:
    pytest.skip("ai-dynamo and ai-dynamo-runtime are not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(300)  # five replicas start on two cores

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG = [{"role": "user", "content": "Tell a story. " + "The quick brown fox jumps over the lazy dog. " * 20}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WHOLE, SPLIT = "whole", "split"
"""Names of the models: as two aggregated replicas serve it, and as one each of encode, prefill and decode."""


class Graph:
    """A frontend, and the replicas by name."""

    def __init__(self, folder: Path) -> None:
        environment = {"DYN_FILE_KV": str(folder), "DYN_DISCOVERY_BACKEND": "file", "DYN_LOG": "warn"}
        environment |= {"DYN_SELF_HOST_METADATA": "0", "HF_HUB_OFFLINE": "1"}
        common = ("--engine", "embedded", "--dynamo", "true", "--dynamo-drain-seconds", "1", "--threads", "1")
        common += ("--kv-cache-memory-mb", "100", "--canary-seconds", "0", "--lease-seconds", "20")
        split = (*common, "--model", "smolvision", "--served-model-name", SPLIT, "--disaggregation-mode")
        flags = {
            "first": (*common, "--served-model-name", WHOLE),
            "second": (*common, "--served-model-name", WHOLE),
            "encode": (*split, "encode", "--dynamo-namespace", "apart", "--encode-inline-kb", "0"),
            "prefill": (*split, "prefill", "--dynamo-namespace", "apart", "--encode-inline-kb", "0"),
            "decode": (*split, "decode", "--dynamo-namespace", "apart"),
        }
        self.replicas = {name: ServerProcess(*each, environment=environment) for name, each in flags.items()}
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = (folder / "frontend.log").open("w+")
        command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", self.url.rpartition(":")[2], "--router-mode", "kv", "--migration-limit", "3"]
        self.frontend = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=self.log, stderr=subprocess.STDOUT
        )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=90)

    def wait(self) -> None:
        for replica in self.replicas.values():
            replica.wait_ready(120)
        deadline = time.monotonic() + 60
        while self.models() != {WHOLE, SPLIT}:
            assert time.monotonic() < deadline and self.frontend.poll() is None, self.frontends_log()
            time.sleep(0.1)

    def models(self) -> set[str]:
        try:
            return {model["id"] for model in httpx.get(f"{self.url}/v1/models").json()["data"]}
        except httpx.TransportError:
            return set()

    def frontends_log(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def ask(self, model: str = WHOLE, messages: Any = QUESTION, **fields: Any) -> Any:
        given = {"max_tokens": 16, "temperature": 0, **fields}
        return self.client.chat.completions.create(model=model, messages=messages, **given)

    def close(self) -> None:
        self.client.close()
        for replica in self.replicas.values():
            if replica.process.poll() is None:
                replica.process.terminate()
        for replica in self.replicas.values():
            replica.wait(60)
        self.frontend.terminate()
        self.frontend.wait(20)
        self.log.close()


@pytest.fixture(scope="module")
def graph(smollm2: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    started = Graph(tmp_path_factory.mktemp("graph"))
    try:
        started.wait()
        yield started
    finally:
        started.close()


def own(graph: Graph, name: str) -> openai.OpenAI:
    """A client of a replica's own HTTP."""
    return openai.OpenAI(base_url=f"{graph.replicas[name].url}/v1", api_key="none", max_retries=0, timeout=90)


@pytest.mark.parametrize("model", [WHOLE, SPLIT])
def test_answers_are_those_of_our_own_http(graph: Graph, model: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    with own(graph, "first" if model == WHOLE else "decode") as http:
        expected = http.chat.completions.create(model=model, messages=QUESTION, **fields)  # type: ignore[call-overload]
    answer = graph.ask(model, **fields)
    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert answer.choices[0].finish_reason == expected.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    for ours, theirs in zip(answer.choices[0].logprobs.content, expected.choices[0].logprobs.content, strict=False):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=0.01)
        assert len(ours.top_logprobs) == 2
    pieces = list(graph.ask(model, stream=True, max_tokens=12))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == expected.choices[0].message.content


def test_prefill_and_decode_share_the_work(graph: Graph) -> None:
    """The prompt's blocks are computed by one and read by the other, and nothing stays behind."""
    prefill, decode = graph.replicas["prefill"], graph.replicas["decode"]
    time.sleep(slowness())  # the engine's statistics, taken ten times a second, have what came before
    read, alone = decode.metric("trtllm_kv_transfer_success_total"), decode.metric("trtllm_prefill_local_total")
    answer = graph.ask(SPLIT, LONG, max_tokens=12)
    decode.wait_metric("trtllm_kv_transfer_success_total", read + 1)
    one = graph.ask(SPLIT, max_tokens=1)
    assert (one.choices[0].message.content, one.choices[0].finish_reason) == ("The", "length")
    assert one.usage.completion_tokens == 1
    several = graph.ask(SPLIT, LONG, n=3, temperature=1, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) == 3
    decode.wait_metric("trtllm_kv_transfer_success_total", read + 4)
    assert decode.metric("trtllm_prefill_local_total") == alone
    with own(graph, "decode") as http:
        expected = http.chat.completions.create(model=SPLIT, messages=LONG, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == expected.choices[0].message.content
    for replica in (prefill, decode):
        replica.wait_metric("trtllm_num_requests_held", 0)
        replica.wait_metric("trtllm_kv_cache_used_blocks", 0)


def test_images_are_encoded_by_the_worker_for_it(graph: Graph) -> None:
    """Its embeddings are read by prefill and decode; when it has been killed, prefill encodes for both."""
    encode, prefill, decode = (graph.replicas[name] for name in ("encode", "prefill", "decode"))
    colour, digits = "What colour is the star?", "What number is shown?"
    with own(graph, "decode") as http:
        chat = [message(colour, shape("blue", "star"))]
        expected = http.chat.completions.create(model=SPLIT, messages=chat, temperature=0)  # type: ignore[arg-type]
    encoded = graph.ask(SPLIT, [message(colour, shape("green", "star"))])
    assert encoded.choices[0].message.content == "The star is green."
    assert encoded.usage.prompt_tokens == expected.usage.prompt_tokens
    several = graph.ask(SPLIT, [message(digits, number(42))], n=2, temperature=0.01)
    assert [choice.message.content for choice in several.choices] == ["The number is 42."] * 2
    assert (encode.metric("trtllm_encoded_images_total"), prefill.metric("trtllm_encoded_images_total")) == (2, 0)
    encode.wait_metric("trtllm_embeddings_held", 0)  # decode has given them up
    with pytest.raises(openai.BadRequestError, match="image"):
        graph.ask(SPLIT, [message(digits, "data:image/png;base64,AAAA")])
    encode.process.send_signal(signal.SIGKILL)
    encode.wait(20)
    assert graph.ask(SPLIT, [message(digits, number(7))]).choices[0].message.content == "The number is 7."
    prefill.wait_metric("trtllm_embeddings_held", 0)
    with pytest.raises(openai.BadRequestError):
        graph.ask(WHOLE, [message(digits, number(7))])
    for replica in (prefill, decode):
        replica.wait_metric("trtllm_kv_cache_used_blocks", 0)


def test_parameters_of_requests_take_effect(graph: Graph) -> None:
    several = graph.ask(n=3, temperature=1, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) == 3
    assert several.usage.completion_tokens <= 48
    assert graph.ask(stop=["France"]).choices[0].message.content.rstrip() == "The capital of"
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    assert '"Paris"' in graph.ask(response_format=schema, max_tokens=40).choices[0].message.content
    assert graph.ask(extra_body={"guided_choice": ["Lima", "Oslo"]}).choices[0].message.content in ("Lima", "Oslo")
    ended = graph.ask(extra_body={"ignore_eos": True}, max_tokens=20)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("length", 20)


def test_mistakes_are_the_clients(graph: Graph) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        graph.ask(max_tokens=100_000)
    with pytest.raises(openai.BadRequestError):
        graph.ask(extra_body={"guided_regex": "("})


def test_the_kv_router_knows_what_is_cached(graph: Graph) -> None:
    """Events reach the router: a conversation goes on where it began, whatever the load, and others go elsewhere."""
    cached = []
    for turn in range(3):
        messages = [{"role": "user", "content": f"Turn. {LONG[0]['content']}"}, *[QUESTION[0]] * turn]
        cached.append(graph.ask(messages=messages, max_tokens=4).usage.prompt_tokens_details.cached_tokens)
        time.sleep(0.2 * slowness())  # the router shows nobody which events it has
    assert cached[0] < 32 and min(cached[1:]) >= 192
    replicas = [graph.replicas[name] for name in ("first", "second")]
    before = [replica.metric("trtllm_request_success_total") for replica in replicas]
    with ThreadPoolExecutor(6) as pool:
        prompts = [[{"role": "user", "content": f"{number} is a number. " * 6}] for number in range(6)]
        list(pool.map(lambda messages: graph.ask(messages=messages), prompts))
    after = [replica.metric("trtllm_request_success_total") for replica in replicas]
    assert min(now - then for now, then in zip(after, before, strict=True)) >= 1


def test_a_client_that_leaves_ends_its_request(graph: Graph) -> None:
    replicas = [graph.replicas[name] for name in ("first", "second")]
    before = sum(replica.metric("trtllm_num_aborted_requests_total") for replica in replicas)
    stream = graph.ask(stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 20 * slowness()
    while (now := sum(replica.metric("trtllm_num_aborted_requests_total") for replica in replicas)) == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert now == before + 1
    for replica in replicas:
        replica.wait_metric("trtllm_kv_cache_used_blocks", 0)


class Load:
    """Streams that are asked one after another, in several threads, until `stop`."""

    def __init__(self, graph: Graph, model: str, threads: int) -> None:
        self.ends: list[str] = []
        self._graph = graph
        self._model = model
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        while not self._stopped.is_set():
            messages = [{"role": "user", "content": f"Count from {number}."}]
            try:
                pieces = self._graph.ask(
                    self._model, messages, stream=True, max_tokens=24, extra_body={"ignore_eos": True}
                )
                ends = [piece.choices[0].finish_reason for piece in pieces if piece.choices]
                self.ends.append(ends[-1] or "broken off")
            except openai.APIError as error:
                self.ends.append(type(error).__name__)

    def wait(self, requests: int) -> None:
        """Wait until so many more requests have ended, in whatever way."""
        goal, deadline = len(self.ends) + requests, time.monotonic() + 60 * slowness()
        while len(self.ends) < goal:
            assert time.monotonic() < deadline, f"requests hang: {self.ends}"
            time.sleep(0.02)

    def stop(self) -> list[str]:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60 * slowness())
            assert not thread.is_alive(), "a request hangs"
        return self.ends


def test_without_its_only_prefill_worker_a_model_is_unavailable(graph: Graph) -> None:
    """By Dynamo's rules: requests fail with a status, and none hangs."""
    load = Load(graph, SPLIT, 3)
    load.wait(4)
    graph.replicas["prefill"].process.send_signal(signal.SIGKILL)
    load.wait(9)
    ends = load.stop()
    assert ends[:4] == ["length"] * 4 and set(ends) == {"length", "InternalServerError"}, ends
    with pytest.raises(openai.InternalServerError):
        graph.ask(SPLIT)
    graph.replicas["decode"].wait_metric("trtllm_num_requests_running", 0)


def test_requests_of_a_killed_replica_migrate(graph: Graph) -> None:
    load = Load(graph, WHOLE, 4)
    load.wait(6)
    graph.replicas["first"].process.send_signal(signal.SIGKILL)
    load.wait(8)
    ends = load.stop()
    assert set(ends) == {"length"}, (ends, graph.frontends_log())


def test_a_replica_drains_on_its_signal(graph: Graph) -> None:
    """It leaves discovery first; what runs ends as if nothing had happened."""
    last = graph.replicas["second"]
    stream = iter(graph.ask(stream=True, max_tokens=60, extra_body={"ignore_eos": True}))
    pieces = [next(stream)]
    last.process.send_signal(signal.SIGTERM)
    pieces += stream
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "length"
    assert last.wait(60) == 0, last.log
    with pytest.raises(openai.APIStatusError) as refused:
        graph.ask()
    assert refused.value.status_code in (404, 503)
