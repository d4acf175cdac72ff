"""No accepted body blocks the event loop. `python -m benchmarks.fairness`, which needs a quiet machine, measures how
long other clients wait."""

import asyncio
import json
import time
from pathlib import Path

from benchmarks.fairness import HEADERS, attacks
from engine.kit.collector import uncollected
from tests.support.servers import application
from tests.support.waiting import slowness

CONTEXT = 8192
STALL = 0.1
"""Seconds; the largest bodies take 40 to 60 ms on a slow core, and what this test guards against took seconds."""


async def _watch(lags: list[float]) -> None:
    """Note for how much CPU time of this process the event loop stood still: other processes do not count."""
    while True:
        began = time.process_time()
        await asyncio.sleep(0.0005)
        lags.append(time.process_time() - began)


async def test_no_body_stops_the_event_loop(tmp_path: Path) -> None:
    """The best of three counts. No garbage is collected: a server's objects are frozen, while those of all tests are
    walked for 0.1 s.

    With a script, the engine has guides. The template leaves tools out, so that large ones fit the context.
    """
    script = tmp_path / "script.json"
    script.write_text(json.dumps(["Sunny."]))
    template = tmp_path / "template.jinja"
    template.write_text("{% if tools %}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}")
    settings = {"tool_call_parser": "hermes", "fake_script": script, "chat_template": template}
    stalls: dict[str, float] = {}
    bodies = attacks(CONTEXT, "http://127.0.0.1:9", images=False, model="fake")
    async with application(max_tokenize_tokens=4 * CONTEXT, **settings) as (client, _):
        for name, (path, (body, *_)) in bodies.items():
            worst: list[float] = []
            for _ in range(3):
                lags: list[float] = []
                watching = asyncio.create_task(_watch(lags))
                with uncollected():
                    await asyncio.sleep(0.01)
                    await client.post(path, content=body, headers=HEADERS)
                    await asyncio.sleep(0.01)
                watching.cancel()
                worst.append(max(lags))
            stalls[name] = min(worst) / slowness()
    assert max(stalls.values()) < STALL, stalls
