"""Embeddings on a GPU that another process reads by CUDA IPC."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

torch = pytest.importorskip("torch")

from engine.embedded.vision.kept import RowsReader  # noqa: E402
from engine.media import RemoteRows  # noqa: E402
from engine.transfer.base import TransferError  # noqa: E402
from tests.support.environment import python_path  # noqa: E402
from tests.support.kept_owner import rows_of  # noqa: E402

ROWS = 4096
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@asynccontextmanager
async def owner() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.kept_owner", str(ROWS)),
        env={**os.environ, "PYTHONPATH": python_path()},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def where(process: asyncio.subprocess.Process) -> RemoteRows:
    assert process.stdout is not None
    return msgspec.msgpack.decode(bytes.fromhex((await process.stdout.readline()).decode()), type=RemoteRows)


async def test_rows_on_a_gpu_are_read_while_they_are_there() -> None:
    device = torch.device("cuda", 0)
    reader = RowsReader(4 << 20, 5.0)

    async def read(rows: RemoteRows) -> bytes:
        return bytes(await reader.read(rows, device))  # type: ignore[arg-type]

    async with owner() as process:
        assert process.stdin is not None
        first = await where(process)
        for _ in range(3):
            assert await read(first) == rows_of(ROWS, 0).view(torch.uint8).numpy().tobytes()
        process.stdin.write(b"next\n")
        second = await where(process)
        assert (second.offset, second.offers) == (first.offset, first.offers)
        with pytest.raises(TransferError, match="given up before they had been read"):
            await read(first)
        assert await read(second) == rows_of(ROWS, 1).view(torch.uint8).numpy().tobytes()
        free = torch.cuda.mem_get_info(torch.cuda.device_count() - 1)[0]
        process.kill()
        await process.wait()
        with pytest.raises(TransferError, match="gone"):
            await read(second)
        async with asyncio.timeout(20):  # the memory of a dead process is let go
            while torch.cuda.mem_get_info(torch.cuda.device_count() - 1)[0] <= free:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    await reader.close()
