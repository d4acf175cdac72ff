"""Pictures and videos behind a router: any replica makes them, and the one that has a file or a job is asked for it."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.routers.proxy.test_http import available
from tests.routers.visual.test_images import NEW, picture
from tests.support.disaggregated import replica
from tests.support.routing import router
from tests.support.waiting import slowness

BODY = {"model": "fake", "prompt": "a red circle"}


async def test_a_router_finds_what_a_replica_has_made(tmp_path: Path) -> None:
    pytest.importorskip("av")
    settings: list[dict[str, Any]] = [{"modality": "visual", "cache_dir": tmp_path / name} for name in ("a", "b")]
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(replica("aggregated", **each)) for each in settings]
        url, life = await stack.enter_async_context(router([one[0] for one in found], modality="visual"))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
        await available(life, 2)
        used = set()
        for _ in range(2):
            answer = await client.post(NEW, json=BODY | {"response_format": "url"})
            used.add(answer.headers["x-trellis-replica"])
            place = answer.json()["data"][0]["url"]
            assert place.startswith(f"{url}/v1/"), "not the replica, which clients may not reach"
            file = await client.get(place)
            assert file.status_code == 200
            assert file.headers["x-trellis-replica"] == answer.headers["x-trellis-replica"]
            job = await client.post("/v1/videos", json=BODY)
            async with asyncio.timeout(20 * slowness()):
                path = f"/v1/videos/{job.json()['id']}"
                while (now := await client.get(path)).json()["status"] != "completed":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert now.headers["x-trellis-replica"] == job.headers["x-trellis-replica"]
        changed = await client.post(
            "/v1/images/edits",
            data={"prompt": "blue", "model": "fake"},
            files={"image": ("a.png", picture(), "image/png")},
        )
        assert changed.status_code == 200
        # What the router has forgotten, or never knew, is asked for at all replicas.
        async with httpx.AsyncClient() as direct:
            own = (await direct.post(f"{found[0][0]}{NEW}", json=BODY | {"response_format": "url"})).json()
        for _ in range(3):
            assert (await client.get(httpx.URL(own["data"][0]["url"]).path)).status_code == 200
        assert (await client.get("/v1/images/files/none.png")).status_code == 404
