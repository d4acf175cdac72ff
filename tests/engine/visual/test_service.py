"""The engine of pictures in a process of its own."""

import os

import pytest

from engine.errors import EngineDied, InvalidRequest
from engine.process.child import ServiceProcess
from engine.visual.service import VISUAL, VisualClient
from engine.visual.types import VisualConfig, VisualDelta
from tests.engine.visual.test_engine import asked, files


async def test_in_a_process_of_its_own() -> None:
    """Files to change are sent, reports and files come back, closing aborts, and a death is reported."""
    process = ServiceProcess(VISUAL, VisualConfig(backend="fake", model="fake", step_seconds=0.01))
    await process.start()
    client = VisualClient(process.address, process.wait_failed)
    try:
        await client.start()
        assert client.info.makes == ("image", "video")
        plain, changed = await files(client, asked()), await files(client, asked(image=b"picture", mask=b"mask"))
        assert plain != changed
        with pytest.raises(InvalidRequest) as refused:
            await files(client, asked("refuse"))
        assert refused.value.param == "prompt"
        stream = client.generate(asked(steps=10_000))
        await anext(stream)
        stream.close()
        assert await files(client, asked("after"))
        dying = client.generate(asked(steps=10_000))
        assert isinstance(await anext(dying), VisualDelta)
        assert process.pid is not None
        os.kill(process.pid, 9)
        with pytest.raises(EngineDied):
            async for _ in dying:
                pass
    finally:
        await client.close()
        await process.close()
