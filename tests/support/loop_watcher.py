"""A process that measures event loops: `python tests/support/loop_watcher.py HOST PORT`.

Once its input ends, it prints two 99th percentiles in seconds: how late an event loop is that computes 2 ms in 5, on
this machine at this time, and how soon a server says that it lives.
"""

import asyncio
import sys
import time

import uvloop


async def _timer(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.05
        await asyncio.sleep(0.05)
        lags.append(time.perf_counter() - due)


async def _compute() -> None:
    while True:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0.003)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    began = time.perf_counter()
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: server\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    return time.perf_counter() - began


async def main(host: str, port: str) -> None:
    lags: list[float] = []
    answers: list[float] = []
    tasks = [asyncio.create_task(_timer(lags)), asyncio.create_task(_compute())]
    reader, writer = await asyncio.open_connection(host, int(port))
    end = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not end.done():
        answers.append(await _answer(reader, writer))
        await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    writer.close()
    for values in (lags, answers):
        sys.stdout.write(f"{sorted(values)[len(values) * 99 // 100]}\n")


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
