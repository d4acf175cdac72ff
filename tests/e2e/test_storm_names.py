"""Image hosts whose names lead to private addresses, to others at each lookup, and onwards by redirects.

The server is whole; its resolver is the test's. No address is really dialled: all connections end at one server here,
which notes whom they were for.
"""

import asyncio
import random
import socket
from collections import Counter
from ipaddress import ip_address
from typing import Any

import httpx
import pytest

from multimodal.media import fetch
from tests.support.media import Detour, OddServer, image_file, moved, ok
from tests.support.servers import application
from tests.support.storm import SEEDS

PUBLIC = ("93.184.215.14", "1.1.1.1", "8.8.8.8", "2606:2800:21f:cb07::1", "2a00:1450:4001::5e")
PRIVATE = (
    *("127.0.0.1", "10.0.0.5", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("::1", "::", "fe80::1", "fd00:ec2::254", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1"),
    *("2002:7f00:1::", "2001:0:7f00:1::", "255.255.255.255", "198.18.0.1", "ff02::1"),
)
NAMES = 60


class Resolver:
    """Answers differently each time, as rebinding has it, and remembers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.asked: Counter[str] = Counter()
        self.allowed: set[str] = set()
        """Names whose first answer has public addresses alone."""
        self.real = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if not str(host).endswith(".test"):
            return self.real(host, port, *arguments, **options)
        self.asked[host] += 1
        public = self._rng.random() < 0.5
        found = self._rng.sample(PUBLIC, self._rng.randint(1, 3))
        if not public:
            found.insert(self._rng.randint(0, len(found)), self._rng.choice(PRIVATE))
        if self.asked[host] == 1 and public:
            self.allowed.add(host)
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, 1, 6, "", (one, port)) for one in found]


@pytest.mark.parametrize("seed", SEEDS)
async def test_names_that_change_lead_to_public_addresses_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    resolver = Resolver(rng)
    odd = OddServer()
    server = await asyncio.start_server(odd.serve, "127.0.0.1", 0)
    detour = Detour(server.sockets[0].getsockname()[1])
    monkeypatch.setattr(fetch, "Transport", lambda **_: detour)
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    odd.answers["/image"] = ok(image_file())
    hops: dict[str, list[str]] = {}
    for number in range(NAMES):
        names = [f"n{number}-{hop}.test" for hop in range(rng.randint(1, 4))]
        hops[f"http://{names[0]}/{number}-0"] = names
        for hop, name in enumerate(names[1:]):
            odd.answers[f"/{number}-{hop}"] = moved(f"http://{name}/{number}-{hop + 1}")
        odd.answers[f"/{number}-{len(names) - 1}"] = ok(image_file(size=(8 + number, 8)))

    async def ask(client: httpx.AsyncClient, url: str) -> int:
        content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
        answer = await client.post(
            "/v1/chat/completions",
            json={"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 1},
        )
        assert answer.status_code in (200, 400), answer.text
        assert not any(address in answer.text for address in (*PUBLIC, *PRIVATE) if len(address) > 4)
        return answer.status_code

    async with application() as (client, _):
        statuses = await asyncio.gather(*(ask(client, url) for url in hops))
    server.close()
    dialled = [ip_address(address) for address in detour.dialled]
    assert dialled and all(address.is_global for address in dialled)
    assert set(resolver.asked.values()) == {1}, "one lookup for each hop, whose answer is what is dialled"
    for status, names in zip(statuses, hops.values(), strict=True):
        assert (status == 200) == (set(names) <= resolver.allowed), names
    assert {200, 400} <= set(statuses)
