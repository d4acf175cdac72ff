"""A wall clock that jumps by hours and years, forwards and back, in every process of a fleet.

A small library, loaded before all others, moves what the C library says; timeouts must not notice.
"""

import asyncio
import mmap
import random
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.disaggregated import servers
from tests.support.servers import ServerProcess
from tests.support.storm import SEEDS, TEXT

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *offset;
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_FILE"), O_RDONLY);
    offset = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    close(file);
}
int clock_gettime(clockid_t id, struct timespec *at) {
    int code = syscall(SYS_clock_gettime, id, at);
    if (!code && offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *offset;
    return code;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return code;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
HOUR = 3600
JUMPS = (0, HOUR, -HOUR, 24 * HOUR, -24 * HOUR, 3 * 365 * 24 * HOUR, -3 * 365 * 24 * HOUR)
SECONDS = 3.0
COMMON = (
    *("--fake-token-delay-ms", "10", "--canary-seconds", "1", "--queue-timeout-seconds", "10", "--lease-seconds", "10"),
    *("--body-timeout-seconds", "10", "--send-timeout-seconds", "10", "--request-timeout-seconds", "60"),
    *("--sse-ping-seconds", "1"),
)


class Clock:
    """How far all clocks are off, in a file that every process maps."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def jump(self, seconds: int) -> None:
        self._map[:] = struct.pack("=q", seconds)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Clock, list[ServerProcess]]]:
    """The clock of a prefill replica, a decode replica and a router, and these."""
    folder = tmp_path_factory.mktemp("clock")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("a compiler makes the library")
    (folder / "clock.c").write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / "clock.so"), str(folder / "clock.c")]
    subprocess.run(command, check=True, capture_output=True)
    clock = Clock(folder / "clock")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("CLOCK_FILE", str(folder / "clock"))
        patch.setenv("LD_PRELOAD", str(folder / "clock.so"))
        (prefill,) = stack.enter_context(servers((*COMMON, "--disaggregation-mode", "prefill")))
        urls = ("--prefill-urls", prefill.url, "--prefill-min-tokens", "0")
        (decode,) = stack.enter_context(servers((*COMMON, "--disaggregation-mode", "decode", *urls)))
        urls = ("--route-urls", decode.url, "--route-policy", "least_loaded")
        (router,) = stack.enter_context(servers((*COMMON, "--disaggregation-mode", "router", *urls)))
        yield clock, [prefill, decode, router]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_timeout_notices_that_the_wall_clock_jumps(seed: int, fleet: tuple[Clock, list[ServerProcess]]) -> None:
    clock, replicas = fleet
    prefill, decode, router = replicas
    counts, local = [len(replica.lines) for replica in replicas], decode.metric("trtllm_prefill_local_total")
    created = asyncio.run(storm(router.url, clock, random.Random(seed)))
    assert max(created) - min(created) > 24 * HOUR, "the clock of the replica has jumped"
    for replica, count in zip(replicas, counts, strict=True):
        assert not [line for line in replica.lines[count:] if re.search("WARNING|ERROR|again", line)]
    assert decode.metric("trtllm_prefill_local_total") == local
    for replica in (prefill, decode):
        replica.wait_metric("trtllm_kv_cache_used_blocks", 0)


async def storm(url: str, clock: Clock, rng: random.Random) -> list[int]:
    """Ask while the clock jumps; every answer must be right. Returns the times that the answers give."""
    end = time.monotonic() + SECONDS
    created: list[int] = []

    async def ask(client: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            body = {"model": "fake", "prompt": TEXT, "max_tokens": rng.randint(1, 60), "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            text = found["choices"][0]["text"]
            assert (TEXT * 9).startswith(text) and found["usage"]["completion_tokens"] == body["max_tokens"]
            created.append(found["created"])

    async def watch(client: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            assert (await client.get("/health/ready")).status_code == 200
            clock.jump(rng.choice(JUMPS))
            await asyncio.sleep(rng.random() * 0.1)

    async with httpx.AsyncClient(base_url=url, timeout=30) as client, asyncio.TaskGroup() as group:
        group.create_task(watch(client))
        for _ in range(8):
            group.create_task(ask(client))
    return created
