"""The grammar worker and the cache in front of it: nothing a user writes can hang or end the engine."""

import asyncio
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from engine.embedded.grammar.compiler import GrammarCompiler
from engine.errors import EngineFailure, EngineNotReady, InvalidRequest
from engine.types import Guide, GuideKind
from tests.support.grammar import EOS, VOCAB, accepts, compiler, tokenizer, tokenizer_folder

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


async def test_a_timeout_kills_the_worker_and_refuses_the_guide(tokenizer_folder: Path) -> None:
    before = workers()
    compiler = GrammarCompiler(tokenizer_folder, VOCAB, (EOS,), timeout=0.0001)
    with pytest.raises(InvalidRequest, match=r"takes longer than 0\.0001 seconds"):
        await compiler.compile(Guide("regex", "ab"))
    assert workers() == before
    await compiler.close()


def workers() -> list[psutil.Process]:
    running = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in running if "engine.embedded.grammar.worker" in child.cmdline()]


async def test_a_lost_worker_is_replaced_and_close_leaves_none(tokenizer_folder: Path) -> None:
    before = {process.pid for process in workers()}
    compiler = GrammarCompiler(tokenizer_folder, VOCAB, (EOS,), timeout=20.0)
    await compiler.compile(Guide("regex", "a"))
    mine = [process for process in workers() if process.pid not in before]
    assert len(mine) == 1
    mine[0].kill()
    mine[0].wait(10)
    with pytest.raises(InvalidRequest, match="too much memory or nests too deeply"):
        await compiler.compile(Guide("regex", "b"))
    await compiler.compile(Guide("regex", "b"))
    await compiler.close()
    assert {process.pid for process in workers()} <= before
    with pytest.raises(EngineNotReady):
        await compiler.compile(Guide("regex", "c"))


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
    waiting = asyncio.create_task(compiler.compile(Guide("regex", "[a-z]{3}")))
    await asyncio.sleep(0.2)
    await compiler.close()
    with pytest.raises(EngineNotReady):
        await waiting
