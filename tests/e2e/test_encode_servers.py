"""Encode, prefill and decode replicas as processes.

A chat with images is answered as by one server, and each image is encoded once.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from engine.process.sockets import free_port
from tests.support.disaggregated import servers, wait_empty
from tests.support.media import data_url, png
from tests.support.servers import ROOT, ServerProcess
from tests.support.waiting import slowness


def chat(*images: int, text: str = "What is this?", **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(png(8, 8, padding=1 + index))}} for index in images]
    content = [{"type": "text", "text": text}, *parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **fields}


def ask(server: ServerProcess, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20, verify=False)


def encoded(replicas: Sequence[ServerProcess]) -> float:
    return sum(replica.metric("trtllm_encoded_images_total") for replica in replicas)


def to(*replicas: ServerProcess) -> tuple[str, str]:
    return "--encode-urls", ",".join(replica.url for replica in replicas)


ENCODE, PREFILL = ("--disaggregation-mode", "encode", "--encode-inline-kb", "0"), ("--disaggregation-mode", "prefill")


def test_a_chat_with_images_equals_that_of_one_server_and_survives_on_its_cache() -> None:
    with servers(ENCODE, ENCODE, PREFILL, ()) as (one, two, prefill, whole):
        urls = (*to(one, two), "--prefill-urls", prefill.url, "--prefill-min-tokens", "0")
        with servers(("--disaggregation-mode", "decode", "--encode-fallback", "refuse", *urls)) as (front,):
            for images in ((1,), (2, 1), (3, 4, 5, 3), ()):
                answers = [ask(server, chat(*images)) for server in (front, whole)]
                assert {answer.status_code for answer in answers} == {200}, answers[0].text
                first, second = (answer.json() for answer in answers)
                assert first["choices"] == second["choices"] and first["usage"] == second["usage"]
            assert encoded([one, two]) == 5, "each image once"
            assert min(replica.metric("trtllm_encoded_images_total") for replica in (one, two)) > 0
            for peer in (one, two):
                peer.wait_metric("trtllm_embeddings_held", 0)
                peer.process.kill()
            known = ask(front, chat(2, 1))
            assert known.status_code == 200 and ask(front, chat(text="No image")).status_code == 200
            began = time.monotonic()
            refused = ask(front, chat(9))
            assert (
                refused.status_code == 503
                and refused.headers["retry-after"]
                and time.monotonic() - began < 10 * slowness()
            )
            assert "http" not in refused.text and "encode replica" in refused.json()["error"]["message"]
            assert httpx.get(f"{front.url}/health/ready").status_code == 200, (
                "chats without images, and with known ones, are answered"
            )
            wait_empty(prefill, front)


def test_killed_encode_replicas_under_load_cost_no_chat() -> None:
    """One of two is killed, then the other: from then on the front encodes itself."""
    slow = (*ENCODE, "--fake-token-delay-ms", "20")
    with servers(slow, slow) as (one, two), servers(to(one, two)) as (front,), ThreadPoolExecutor(16) as threads:
        asked = []
        for replica, some, more in ((one, 5, 40), (two, 20, 20)):
            first = len(asked)
            asked += [threads.submit(ask, front, chat(10 * i, 10 * i + 1)) for i in range(first, first + more)]
            deadline = time.monotonic() + 30
            while encoded([replica]) < some:  # of 20 images or more for each
                assert time.monotonic() < deadline
                time.sleep(0.01)
            replica.process.kill()
        asked += [threads.submit(ask, front, chat(10 * i, 10 * i + 1)) for i in range(60, 80)]
        assert {each.result().status_code for each in asked} == {200}
        assert front.metric("trtllm_encode_local_total") > 0
        wait_empty(front)


def test_a_draining_encode_replica_finishes_what_it_has() -> None:
    pause = min(4.0, 1.5 * slowness())
    slow = (*ENCODE, "--fake-token-delay-ms", str(int(1700 * pause)))
    with (
        servers(slow) as (only,),
        servers((*to(only), "--encode-fallback", "refuse")) as (front,),
        ThreadPoolExecutor(4) as threads,
    ):
        asked = [threads.submit(ask, front, chat(index)) for index in range(4)]
        time.sleep(pause)
        only.process.terminate()
        assert only.wait() == 0
        assert {each.result().status_code for each in asked} == {200}
        assert "cut off" not in only.log


def test_one_command_starts_and_stops_replicas_of_every_kind() -> None:
    counts = ("--encode", "1", "--prefill", "1")  # and 2 to decode
    command = [
        sys.executable,
        str(ROOT / "deploy/disaggregated.py"),
        *counts,
        "--engine",
        "fake",
        "--prefill-min-tokens",
        "0",
    ]
    environment = {**os.environ, "PORT": str(free_port())}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        log: list[str] = []
        reading = threading.Thread(target=lambda stream: log.append(stream.read()), args=(process.stderr,), daemon=True)
        reading.start()
        try:
            line = process.stdout.readline()
            children = psutil.Process(process.pid).children(recursive=True)
            url = re.findall(r"http://\S+/v1", line)[0]
            answer = httpx.post(f"{url}/chat/completions", json=chat(1, 2), timeout=20)
            assert answer.status_code == 200, answer.text
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            reading.join(5)
        assert re.search(r"encode-1: .*ready: http://\S+/encode serves fake", log[0])
        assert len(children) >= 5 and not [child for child in children if child.is_running()]
