"""Prefill on one host and decode on another, over TCP.

The hosts are network namespaces with nothing but a cable between them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.engine.transfer.test_network import hosts, ip, pytestmark  # noqa: F401 - the cable, and the reason to skip
from tests.support.chaos import FLAGS, PROMPTS, write_model
from tests.support.disaggregated import SECRET
from tests.support.waiting import slowness

PREFILL, DECODE = "http://10.213.7.1:8000", "http://10.213.7.2:8000"
LONGEST = max(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))
ASK = """
import json, sys, urllib.request
url, fields = json.loads(sys.argv[1])
body = None if fields is None else json.dumps(fields).encode()
request = urllib.request.Request(url, body, {"content-type": "application/json"})
with urllib.request.urlopen(request, timeout=20) as answer:
    print(json.dumps([answer.status, answer.read().decode()]))
"""
"""Starts ten times sooner than with httpx: it has to see what lasts two seconds."""


def within(host: str, *command: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(["ip", "netns", "exec", host, sys.executable, *command], text=True, **options)


@contextmanager
def replica(host: str, log: Path, *flags: str) -> Iterator[None]:
    """A server at port 8000 of all addresses of its host; ready, and ended afterwards."""
    command = ("-m", "server", *FLAGS, "--host", "0.0.0.0", "--port", "8000", "--internal-secret", SECRET, *flags)
    with (
        log.open("w") as stderr,
        within(host, *command, stderr=stderr, cwd=Path(__file__).resolve().parents[2], env={**os.environ}) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while "ready: http" not in log.read_text():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield
        finally:
            process.terminate()


def ask(host: str, url: str, fields: dict[str, Any] | None = None) -> str:
    """The body of an answer to somebody on `host`."""
    with within(host, "-c", ASK, json.dumps([url, fields]), stdout=subprocess.PIPE) as process:
        status, body = json.loads(process.communicate(timeout=30)[0])
    assert status == 200, body
    return str(body)


def fields_of(salt: str) -> dict[str, Any]:
    return {"prompt": PROMPTS[LONGEST], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "cache_salt": salt}


def text_of(host: str, salt: str) -> str:
    return str(json.loads(ask(host, f"{DECODE}/v1/completions", fields_of(salt)))["choices"][0]["text"])


def counted(host: str, name: str, url: str = DECODE) -> float:
    return sum(
        float(line.rpartition(" ")[2]) for line in ask(host, f"{url}/metrics").splitlines() if line.startswith(name)
    )


def wait_counted(host: str, name: str, value: float) -> None:
    """Statistics come ten times a second."""
    deadline = time.monotonic() + 20
    while (now := counted(host, name)) != value:
        assert time.monotonic() < deadline, f"{name} is {now}, not {value}"


def test_two_hosts_answer_as_one(hosts: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    """Answers stay equal where the cable is slow, and where it is pulled out while blocks are read.

    In the latter case the decode replica computes the prompt.
    """
    model = tmp_path / "model"
    write_model(model)
    common = (
        "--model",
        str(model),
        "--kv-transfer",
        "tcp",
        "--transfer-timeout-seconds",
        "2",
    )  # processes here could share memory
    with ExitStack() as stack:
        with replica(hosts[1], tmp_path / "whole.log", *common):
            expected = text_of(hosts[1], "")
        stack.enter_context(
            replica(
                hosts[0], tmp_path / "prefill.log", *common, "--disaggregation-mode", "prefill", "--lease-seconds", "4"
            )
        )
        decode = (*common, "--disaggregation-mode", "decode", "--prefill-urls", PREFILL, "--prefill-attempts", "1")
        stack.enter_context(replica(hosts[1], tmp_path / "decode.log", *decode))
        assert text_of(hosts[1], "a") == expected
        wait_counted(hosts[1], "trtllm_kv_transfer_success_total", 1)
        cable = (
            subprocess.check_output(["ip", "-n", hosts[0], "-o", "link", "show", "type", "veth"], text=True)
            .split()[1]
            .split("@")[0]
        )
        limit = ("add", "dev", cable, "root", "tbf", "rate", "1mbit", "burst", "32kb", "latency", "100ms")
        subprocess.run(["tc", "-n", hosts[0], "qdisc", *limit], check=True, capture_output=True)
        assert text_of(hosts[1], "b") == expected
        wait_counted(hosts[1], "trtllm_kv_transfer_failure_total", 1)
        with within(
            hosts[1], "-c", ASK, json.dumps([f"{DECODE}/v1/completions", fields_of("c")]), stdout=subprocess.PIPE
        ) as process:
            while not counted(hosts[1], "trtllm_num_requests_fetching"):
                assert process.poll() is None, "it was over before the cable was out"
            ip("-n", hosts[0], "link", "set", cable, "down")
            began = time.monotonic()
            status, body = json.loads(process.communicate(timeout=30)[0])
        assert (
            status == 200
            and json.loads(body)["choices"][0]["text"] == expected
            and time.monotonic() - began < 10 * slowness()
        )
        assert text_of(hosts[1], "d") == expected
        wait_counted(hosts[1], "trtllm_kv_transfer_failure_total", 2)
        wait_counted(hosts[1], "trtllm_kv_cache_used_blocks", 0)
        alone = counted(hosts[1], "trtllm_prefill_local_total")
        assert alone in (1, 2), "the last prompt, and the one before it unless its first token had come by then"
        while counted(hosts[0], "trtllm_kv_cache_used_blocks", PREFILL):
            assert time.monotonic() - began < 10 * slowness(), "a lease ends without a word from its decode replica"
