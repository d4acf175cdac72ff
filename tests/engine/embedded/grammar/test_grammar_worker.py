"""The grammar worker and the cache in front of it: no guide can hang or end the engine."""

import asyncio
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from engine.embedded.grammar.compiler import GrammarCompiler
from engine.errors import EngineFailure, EngineNotReady, EngineUnavailable, InvalidRequest
from engine.types import Guide, GuideKind
from tests.support.grammar import EOS, VOCAB, accepts, compiler, tokenizer, tokenizer_folder
from tests.support.servers import running
from tests.support.waiting import until

__all__ = ["compiler", "tokenizer", "tokenizer_folder"]  # fixtures

pytestmark = pytest.mark.asyncio(loop_scope="module")

CATASTROPHES: list[tuple[GuideKind, str]] = [
    ("regex", "((a{1,1000}){1,1000})"),
    ("regex", "(((a{1,1000}){1,1000}){1,1000})"),
    ("regex", "(([a-z]{1,50} ?){1,50})"),
    ("regex", "(" * 20_000 + "a" + ")" * 20_000),
    ("grammar", 'root ::= ("a"{1,1000}){1,1000}'),
    ("grammar", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    ("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000),
    ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}})),
    (
        "json_schema",
        json.dumps(
            {"type": "array", "items": {"type": "string", "maxLength": 2_000_000_000}, "minItems": 2_000_000_000}
        ),
    ),
    (
        "json_schema",
        json.dumps(
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}, "minProperties": 200}
        ),
    ),
]


async def test_catastrophes_end_in_time_and_the_next_guide_compiles(
    tokenizer_folder: Path, tokenizer: Tokenizer
) -> None:
    compiler = GrammarCompiler(tokenizer_folder, VOCAB, (EOS,), timeout=2.0)
    try:
        await compiler.compile(Guide("json_object"))
        for kind, spec in CATASTROPHES:
            started = time.monotonic()
            try:
                await compiler.compile(Guide(kind, spec))
            except InvalidRequest as error:
                assert len(str(error)) < 450
            assert time.monotonic() - started < 30, spec[
                :60
            ]  # the limit, a new start of the worker, and a slow machine
        assert accepts(await compiler.compile(Guide("regex", "ab")), tokenizer, "ab")
    finally:
        await compiler.close()


async def test_a_timeout_refuses_the_guide_and_is_remembered(tokenizer_folder: Path) -> None:
    compiler = GrammarCompiler(tokenizer_folder, VOCAB, (EOS,), timeout=0.0001)
    guide = Guide("regex", "ab")
    with pytest.raises(InvalidRequest, match=r"takes longer than 0\.0001 seconds"):
        await compiler.compile(guide)
    await compiler.close()
    with pytest.raises(EngineNotReady):
        await compiler.compile(guide)


def workers() -> list[psutil.Process]:
    return running(psutil.Process(), "engine.embedded.grammar.worker")


async def suspend(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.suspend()
    await until(lambda: all(process.status() == psutil.STATUS_STOPPED for process in processes))


class Own:
    """A compiler with two workers of its own, and their processes."""

    def __init__(self, folder: Path) -> None:
        self.compiler = GrammarCompiler(folder, VOCAB, (EOS,), timeout=60.0)
        self.pool = self.compiler._pools["llguidance"]
        self._before = {process.pid for process in workers()}

    async def __aenter__(self) -> "Own":
        await asyncio.gather(self.pool.start(), self.pool.start())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.compiler.close()
        assert self.processes() == []

    def processes(self) -> list[psutil.Process]:
        return [process for process in workers() if process.pid not in self._before]

    async def busy(self, stopped: list[psutil.Process]) -> psutil.Process:
        """Wait until one of the stopped processes has been asked something, and return it."""
        pool = self.pool

        def asked() -> list[psutil.Process]:
            processes = [worker._process for worker in pool._workers if worker not in pool._idle]
            running = {process.pid for process in processes if process is not None}
            return [process for process in stopped if process.pid in running]

        await until(asked)
        return asked()[0]


async def test_all_libraries_are_warm_before_a_request_needs_them(
    tokenizer_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.embedded.grammar.compiler._LATER_SECONDS", 0.0)
    async with Own(tokenizer_folder) as own:
        await own.compiler.warm_up(xgrammar=True)
        warm = {process.pid for process in own.processes()}
        assert len(warm) == 3
        assert accepts(await own.compiler.compile(Guide("grammar", 'root ::= "a" "b"')), tokenizer, "ab")
        assert {process.pid for process in own.processes()} == warm


async def test_no_worker_is_left_if_the_warm_up_is_cancelled(tokenizer_folder: Path) -> None:
    before = {process.pid for process in workers()}
    for delay in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2):
        compiler = GrammarCompiler(tokenizer_folder, VOCAB, (EOS,), timeout=60.0)
        task = asyncio.create_task(compiler.warm_up(xgrammar=False))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await compiler.close()  # ends those that had started; a start that was cancelled leaves none to end
        assert {process.pid for process in workers()} <= before


async def test_a_worker_that_is_killed_while_idle_is_replaced_silently(
    tokenizer_folder: Path, tokenizer: Tokenizer
) -> None:
    async with Own(tokenizer_folder) as own:
        for process in own.processes():
            process.kill()
        await asyncio.gather(*(own.compiler.compile(Guide("regex", letter)) for letter in "abc"))
        assert accepts(await own.compiler.compile(Guide("regex", "ab")), tokenizer, "ab")


async def test_a_worker_that_is_killed_at_work_costs_one_retry_and_then_503(tokenizer_folder: Path) -> None:
    async with Own(tokenizer_folder) as own:
        stopped = own.processes()
        assert len(stopped) == 2
        await suspend(stopped)
        task = asyncio.create_task(own.compiler.compile(Guide("regex", "a")))
        first = await own.busy(stopped)
        first.kill()
        stopped.remove(first)
        (await own.busy(stopped)).kill()
        with pytest.raises(EngineUnavailable, match="was killed"):
            await task
        await own.compiler.compile(Guide("regex", "a"))  # and that is not remembered


async def test_the_last_caller_that_leaves_ends_the_compilation(tokenizer_folder: Path) -> None:
    async with Own(tokenizer_folder) as own:
        stopped = own.processes()
        await suspend(stopped)
        tasks = [asyncio.create_task(own.compiler.compile(Guide("regex", "a"))) for _ in range(2)]
        process = await own.busy(stopped)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        assert process.status() == psutil.STATUS_STOPPED, "somebody still waits"
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        await until(lambda: process not in own.processes())
        for other in stopped:
            if other != process:
                other.resume()
        await own.compiler.compile(Guide("regex", "a"))


async def test_a_failed_compilation_is_remembered(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Own(tokenizer_folder) as own:
        errors = []
        for _ in range(2):
            with pytest.raises(InvalidRequest) as caught:
                await own.compiler.compile(Guide("regex", "("))
            errors.append(str(caught.value))
            monkeypatch.setattr(own.compiler, "_pools", {})  # the second time nobody is asked
        monkeypatch.undo()
        assert errors[0] == errors[1]


async def test_bad_expressions_delay_no_small_schema(tokenizer_folder: Path) -> None:
    """Each of the expressions takes a worker a second or more."""
    async with Own(tokenizer_folder) as own:
        hostile = [
            asyncio.create_task(own.compiler.compile(Guide("regex", ".*" * (2000 + index)))) for index in range(8)
        ]
        await own.busy(own.processes())
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        await own.compiler.compile(Guide("json_schema", json.dumps(schema)))
        assert sum(not task.done() for task in hostile) >= 6
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)


async def test_the_worker_ends_with_its_stdin(tokenizer_folder: Path) -> None:
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine.embedded.grammar.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert worker.stdin is not None
    worker.stdin.close()
    assert await asyncio.wait_for(worker.wait(), 20) == 0
    await worker.communicate()


async def test_a_tokenizer_that_cannot_be_read_is_our_failure(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, VOCAB, (EOS,), timeout=20.0)
    with pytest.raises(EngineFailure, match="grammar worker failed"):
        await compiler.compile(Guide("regex", "a"))
    await compiler.close()


async def test_equal_guides_compile_once_and_survive_a_cancelled_caller(compiler: GrammarCompiler) -> None:
    guide = Guide("regex", "once[0-9]")
    tasks = [asyncio.create_task(compiler.compile(guide)) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert len({id(result) for result in results[1:]}) == 1
    assert await compiler.compile(guide) is results[1]


async def test_close_ends_a_compilation_under_way(tokenizer_folder: Path) -> None:
    compiler = GrammarCompiler(tokenizer_folder, VOCAB, (EOS,), timeout=20.0)
    waiting = asyncio.create_task(compiler.compile(Guide("regex", ".*" * 2000)))  # takes a second
    await asyncio.sleep(0.2)
    await compiler.close()
    with pytest.raises(EngineNotReady):
        await waiting
