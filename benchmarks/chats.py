"""A load of chats: conversations of several turns that share a few long system prompts, timed by their client."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from server.bench.prompts import words
from server.bench.summary import percentile

Rows = dict[str, float]
"""Measured values by name; names end with the unit."""


@dataclass(frozen=True, slots=True)
class Chats:
    """`sessions` conversations of `turns` turns, `concurrency` at a time, which share `systems` system prompts.

    `system` and `user` are lengths in words, `answer` in tokens; `pause` is in seconds, before the next turn.
    """

    sessions: int
    turns: int
    concurrency: int
    systems: int
    system: int
    user: int
    answer: int
    pause: float


@dataclass
class Found:
    """Results of a run; times in seconds."""

    ttft: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def rows(self) -> Rows:
        first = sorted(self.ttft)
        return {
            "requests": float(len(first)),
            "hit rate, %": 100 * self.cached / max(self.prompt, 1),
            "TTFT p50, ms": percentile(first, 50) * 1e3,
            "TTFT p99, ms": percentile(first, 99) * 1e3,
            "TTFT mean, ms": sum(first) / max(len(first), 1) * 1e3,
            "whole run, s": self.seconds,
            **{f"{kind}, requests": float(count) for kind, count in sorted(self.kinds.items()) if kind != "right"},
        }


async def converse(url: str, chats: Chats, seed: str, salt: str, found: Found) -> None:
    """Hold all conversations. Equal seeds send equal text; the `salt` keeps runs from sharing KV blocks."""
    rng = random.Random(seed)
    systems = [words(chats.system, rng) for _ in range(chats.systems)]
    talks = iter(
        [
            (systems[i % chats.systems], [words(chats.user, rng) for _ in range(chats.turns)])
            for i in range(chats.sessions)
        ]
    )
    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        model = await served_model(client)

        async def talk() -> None:
            for system, said in talks:
                messages = [{"role": "system", "content": system}]
                for text in said:
                    messages.append({"role": "user", "content": text})
                    messages.append(
                        {"role": "assistant", "content": await turn(client, model, messages, chats.answer, salt, found)}
                    )
                    await asyncio.sleep(chats.pause)

        await asyncio.gather(*(talk() for _ in range(chats.concurrency)))
    found.seconds = time.perf_counter() - began


async def served_model(client: httpx.AsyncClient, url: str = "") -> str:
    """Return the name of the model that a server serves."""
    name: str = (await client.get(f"{url}/v1/models")).raise_for_status().json()["data"][0]["id"]
    return name


async def turn(
    client: httpx.AsyncClient, model: str, messages: list[dict[str, str]], max_tokens: int, salt: str, found: Found
) -> str:
    """Return the answer to a turn. Failed requests are counted and repeated."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt,
    }
    while True:
        kind, text = await ask(client, {**body, "stream_options": {"include_usage": True}}, found)
        found.kinds[kind] += 1
        if kind == "right":
            return text
        await asyncio.sleep(0.2)


async def ask(client: httpx.AsyncClient, body: dict[str, object], found: Found) -> tuple[str, str]:
    """Return how a stream ended, and its text."""
    started, ttft, text = time.perf_counter(), 0.0, ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return f"HTTP {answer.status_code}", ""
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    found.ttft.append(ttft)
                    return "right", text
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return "cut with an error", ""
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                ttft = ttft or (time.perf_counter() - started if text else 0.0)
                if usage := event.get("usage"):
                    found.prompt += usage["prompt_tokens"]
                    found.cached += usage["prompt_tokens_details"]["cached_tokens"]
    except httpx.HTTPError:
        return "cut without a word", ""
    return "ended without a word", ""
