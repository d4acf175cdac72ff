"""Measure what a client that sends the worst that is accepted costs others: `python -m benchmarks.fairness URL`.

The attacker sends one request after the other, without pause.
A plain chat and a chat with a small image are timed while nothing else happens, and during each attack.
"""

import argparse
import base64
import io
import json
import multiprocessing
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from statistics import median

import httpx
from PIL import Image

CHATS = "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}
TEXT_BYTES = 4 << 20
VALUES = 1 << 18
TOOLS = 120
MARK = b"0000Mark0000Mark"
"""The end of each image, in base64. The attacker sends another each time."""
PIXELS = 128_000_000
"""The defaults of the settings MAX_TEXT_MB, MAX_BODY_VALUES and MAX_REQUEST_PIXELS."""


@dataclass(frozen=True)
class Figures:
    """Effects of an attack on other clients."""

    attack: str
    chat: float
    image: float
    """Medians, in seconds."""
    stall: float
    """The longest time for which the event loop stood still, as a bound of the server's histogram."""
    statuses: dict[int, int]
    """Number of answers to the attacker by HTTP status."""


def chat(content: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def image(side: int, seed: int) -> str:
    """Return the data URL of a picture that is cheap to make, to send, and different for each seed."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (seed % 256, seed // 256 % 256, 9)).save(file, "PNG", compress_level=1)
    data = file.getvalue() + seed.to_bytes(8, "big")
    data += bytes(-len(data) % 3) + base64.b64decode(MARK)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def shown(urls: Sequence[str]) -> dict[str, object]:
    return chat([{"type": "image_url", "image_url": {"url": url}} for url in urls])


def attacks(context: int, slow: str, images: bool = True, model: str = "") -> dict[str, tuple[str, list[bytes]]]:
    """Return the path and the bodies of each attack on a model with a context of this many tokens, by the attack's
    name.

    Making the images takes seconds. `slow` is the address of a server that answers a byte a second.
    """
    words = "word " * (TEXT_BYTES // 5 - 1000)
    part = {"type": "text", "text": "x"}
    message = {"role": "user", "content": "x"}
    properties = {str(n): {"type": "string", "description": "x" * 45} for n in range(VALUES // 24 // TOOLS)}
    schema = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(TOOLS)]
    named: dict[str, tuple[str, Sequence[dict[str, object]]]] = {
        "tokenize what fits": ("/tokenize", [{"prompt": "word " * (4 * context - 100)}]),
        "tokenize what may fit": ("/tokenize", [{"prompt": "a" * (TEXT_BYTES // 2)}]),
        "tokenize all that a body holds": ("/tokenize", [{"prompt": words}]),
        "truncate": ("/v1/completions", [{"prompt": words, "truncate_prompt_tokens": 8, "max_tokens": 1}]),
        "truncate one word": (
            "/v1/completions",
            [{"prompt": "a" * (1 << 20), "truncate_prompt_tokens": 8, "max_tokens": 1}],
        ),
        "detokenize": ("/detokenize", [{"tokens": [7] * (4 * context)}]),
        "token ids": ("/v1/completions", [{"prompt": [7] * (VALUES - 100), "truncate_prompt_tokens": 8}]),
        "parts": (CHATS, [chat([part] * (VALUES // 24), top_k=-9)]),
        "messages": (CHATS, [{"messages": [message] * 4096, "max_tokens": 1}]),
        "messages of parts": (
            CHATS,
            [{"messages": [{"role": "user", "content": [part, part]}] * 4096, "max_tokens": 1}],
        ),
        "fields": (CHATS, [chat("x", metadata={str(n): "" for n in range(VALUES // 4 - 100)}, top_k=-9)]),
        "unknown fields": (CHATS, [chat("x", top_k=-9, **{str(n): "" for n in range(VALUES // 4 - 100)})]),
        "schema": (
            CHATS,
            [chat("x", guided_json={"properties": {str(n): {"type": "string"} for n in range(VALUES // 24)}})],
        ),
        "tools": (CHATS, [chat("x", tools=tools, tool_choice="required")]),
        "escapes": (CHATS, [chat("é" * (TEXT_BYTES // 6 - 100))]),
        "large numbers": (CHATS, [chat("x", metadata=[10**399] * (TEXT_BYTES // 410), top_k=-9)]),
    }
    if images:
        large = [image(8000, seed) for seed in range(4)]
        many = [image(2000, seed) for seed in range(64)]
        fetched = [shown([f"{slow}/{turn}/{n}.png" for n in range(32)]) for turn in range(10)]
        named["large images"] = CHATS, [shown(large[:2]), shown(large[2:])]
        named["many images"] = CHATS, [shown(many[:32]), shown(many[32:])]
        named["slow images"] = CHATS, fetched
    assert PIXELS == 2 * 8000 * 8000 == 32 * 2000 * 2000
    return {
        name: (path, [json.dumps({"model": model} | body, separators=(",", ":")).encode() for body in bodies])
        for name, (path, bodies) in named.items()
    }


def attack(url: str, path: str, bodies: list[bytes], statuses: "multiprocessing.Queue[int]") -> None:
    """Send bodies without pause, with images that no cache knows."""
    with httpx.Client(base_url=url, timeout=120, headers=HEADERS) as client:
        for number, body in enumerate(cycle(bodies)):
            statuses.put(client.post(path, content=body.replace(MARK, b"%016d" % number)).status_code)


@contextmanager
def attacking(url: str, path: str, bodies: list[bytes]) -> Iterator[dict[int, int]]:
    """Attack during the block, from a process of its own. The statuses of the answers are known after it."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[int] = context.Queue()
    statuses: dict[int, int] = {}
    process = context.Process(target=attack, args=(url, path, bodies, queue), daemon=True)
    process.start()
    try:
        time.sleep(2)  # it has begun by now
        yield statuses
    finally:
        process.terminate()
        process.join()
        while not queue.empty():
            status = queue.get()
            statuses[status] = statuses.get(status, 0) + 1


@contextmanager
def slow_server() -> Iterator[str]:
    """A server of images that sends a byte a second to each that asks."""

    def trickle(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while True:
                    connection.sendall(b"x")
                    time.sleep(1)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=trickle, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def lags(client: httpx.Client) -> dict[float, float]:
    """Return how often the event loop was late by at most this many seconds."""
    page = client.get("/metrics").text
    return {
        float(bound): float(number)
        for bound, number in re.findall(r'trellis_event_loop_lag_seconds_bucket\{le="(.+)"\} (\S+)', page)
    }


def first_model(client: httpx.Client) -> str:
    """Return the name of the model that the server lists first."""
    return str(client.get("/v1/models").json()["data"][0]["id"])


def timed(client: httpx.Client, make: Callable[[], dict[str, object]], rounds: int) -> float:
    """Return the median time of a chat with the first model."""
    times = []
    model = first_model(client)
    for _ in range(rounds):
        body = json.dumps({"model": model} | make()).encode()
        began = time.perf_counter()
        client.post(CHATS, content=body).raise_for_status()
        times.append(time.perf_counter() - began)
    return median(times)


def others(client: httpx.Client, name: str, rounds: int, statuses: dict[int, int]) -> Figures:
    """Measure what others notice at present."""
    before = lags(client)
    plain = timed(client, lambda: chat(f"Say {next(_seeds)}.", max_tokens=16), rounds)
    shown_image = timed(client, lambda: shown([image(64, next(_seeds))]), rounds)
    after = lags(client)
    late = [
        bound
        for bound, number in after.items()
        if number - before.get(bound, 0) >= max(after.values()) - max(before.values(), default=0)
    ]
    return Figures(name, plain, shown_image, min(late), statuses)


_seeds = count(os.getpid() << 8)


def measure(url: str, names: Sequence[str] = (), rounds: int = 9) -> list[Figures]:
    """Return the figures without an attack, and those of each attack."""
    found: list[Figures] = []
    with httpx.Client(base_url=url, timeout=120, headers=HEADERS) as client, slow_server() as slow:
        context = client.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"]
        others(client, "warm up", 2, {})
        found.append(others(client, "none", rounds, {}))
        for name, (path, bodies) in attacks(context, slow, model=first_model(client)).items():
            if not names or name in names:
                with attacking(url, path, bodies) as statuses:
                    found.append(others(client, name, rounds, statuses))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fairness", description="Measure what attacks cost others"
    )
    parser.add_argument("url", help="of a server with a vision-language model that may fetch from private addresses")
    parser.add_argument("--attack", action="append", default=[], help="only this one; may be given several times")
    parser.add_argument("--rounds", type=int, default=9, help="requests to take the median of")
    args = parser.parse_args()
    print("| attack | plain chat, ms | times | small image, ms | times | loop late by at most, ms | answers |")
    print("|---|---|---|---|---|---|---|")
    found = measure(args.url, args.attack, args.rounds)
    for each in found:
        print(
            f"| {each.attack} | {each.chat * 1e3:.0f} | {each.chat / found[0].chat:.2f} "
            f"| {each.image * 1e3:.0f} | {each.image / found[0].image:.2f} | {each.stall * 1e3:g} | {each.statuses} |"
        )


if __name__ == "__main__":
    main()
