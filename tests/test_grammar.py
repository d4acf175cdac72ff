"""Guided decoding: what grammars allow and forbid, what is refused, and that nothing a user writes can hang or end the engine."""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.embedded.grammar import CompiledGuide, GrammarCompiler, Matcher, new_bitmask
from engine.embedded.sampler import Sampler, SamplerState
from engine.errors import EngineFailure, EngineNotReady, InvalidRequest
from engine.types import Guide, GuideKind, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = 2
SPECIAL = 3
VOCAB = 448
"""Larger than the tokenizer, as padded models have it."""
TEXT = """((7)) ((1)) [[1]] [[2]] The quick brown fox {"name": "value", "items": [1, 2, 3], "ok": true, "none": null} jumps.
  Il était une fois, 日本語. """


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<pad>", "<s>", "</s>", "<|special|>")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    assert tokenizer.get_vocab_size() < VOCAB - 8
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Iterator[Tokenizer]:
    yield Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(tokenizer_folder: Path) -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer_folder, VOCAB, (EOS,), timeout=20.0)
    yield compiler
    await compiler.close()


def allowed(matcher: Matcher) -> set[int]:
    bitmask = new_bitmask(3, VOCAB)
    matcher.fill(bitmask, 1)
    assert bool((bitmask[[0, 2]] == -1).all()), "other rows are left alone"
    return set(np.flatnonzero(np.unpackbits(bitmask[1].numpy().view(np.uint8), bitorder="little")).tolist())


def accepts(guide: CompiledGuide, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the tokens of `text` and then the end pass the masks."""
    matcher = guide.matcher()
    for token in [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]:
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    assert matcher.finished
    return True


def generate(guide: CompiledGuide, tokenizer: Tokenizer, seed: int, limit: int = 400) -> str | None:
    """Text that the masks let a random model write; None if it does not come to an end."""
    matcher, choose, output = guide.matcher(), random.Random(seed), list[int]()
    while len(output) < limit:
        options = sorted(allowed(matcher))
        token = EOS if EOS in options and choose.random() < 0.5 else choose.choice(options)
        matcher.accept(token)
        if matcher.finished:
            return str(tokenizer.decode(output, skip_special_tokens=False))
        output.append(token)
    return None


async def check(compiler: GrammarCompiler, tokenizer: Tokenizer, kind: GuideKind, spec: Any, good: list[str], bad: list[str]) -> None:
    guide = await compiler.compile(Guide(kind, spec if isinstance(spec, str) else json.dumps(spec)))
    assert [text for text in good if not accepts(guide, tokenizer, text)] == []
    assert [text for text in bad if accepts(guide, tokenizer, text)] == []


CHOICES = ["yes", "yes, please", 'a "quoted"\\ back\n', "日本 é 🙂", " ", "<|special|>"]
KINDS: list[tuple[GuideKind, Any, list[str], list[str]]] = [
    ("choice", CHOICES[:-1], CHOICES[:-1], ["", "no", "yesyes", "yes,", "日本"]),
    ("choice", ["", "a"], ["", "a"], ["b"]),
    ("regex", r"[a-z]+@(foo|bar)\.(com|org)", ["me@foo.com", "x@bar.org"], ["me@foo,com", "@foo.com", "me@foo.com "]),
    ("regex", "é+|日本", ["éé", "日本"], ["e", "日"]),
    ("regex", "^ab?$", ["a", "ab"], ["abb"]),
    ("grammar", 'root ::= "(" root ")" | [0-9]', ["7", "((7))"], ["(7", "()", "77"]),
    (
        "json_object",
        "",
        ["{}", '{"a": [1, "x", null]}', '{\n  "a": {\n    "b": 1\n  }\n}'],
        ["[]", "1", '{"a"}', "{} ", '{"a":' + " " * 17 + "1}"],
    ),
]


@pytest.mark.parametrize(("kind", "spec", "good", "bad"), KINDS, ids=lambda value: value if isinstance(value, str) else "")
async def test_kinds(compiler: GrammarCompiler, tokenizer: Tokenizer, kind: GuideKind, spec: Any, good: list[str], bad: list[str]) -> None:
    await check(compiler, tokenizer, kind, spec, good, bad)


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}
TREE = {
    "$defs": {
        "node~1/x": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node~01~1x"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
    "$ref": "#/$defs/node~01~1x",
}
UNION = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "$defs": {
        name: {"type": "object", "properties": {"kind": {"const": name}, "n": {"type": "integer"}}, "required": ["kind"]}
        for name in ("cat", "dog")
    },
}
SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    (PERSON, ['{"name": "é\\n", "age": 3}', '{"name":"x"}'], ["{}", '{"name": 1}', '{"name": "x", "more": 1}', '{"name": "a\tb"}']),
    ({"type": "object"}, ["{}", '{"a": {"b": []}}'], ["[]"]),
    ({"type": "object", "properties": {"a": {"type": "object", "title": "free"}}}, ['{"a": {"b": 1}}', "{}"], ['{"b": 1}']),
    (
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}},
        ['{"a": null, "b": null}'],
        ["{}", '{"b": null}', '{"a": 1}'],
    ),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a": 1}']),
    ({"type": "object", "patternProperties": {"^x[0-9]+$": {"type": "integer"}}}, ['{"x1": 1}', "{}"], ['{"y": 1}', '{"x1": "a"}']),
    ({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}, ['{"abc": 1}'], ['{"d": 1}']),
    ({"type": "array"}, ["[]", '[1, "a"]'], ["{}"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"], ["[]", "[1,2,3]", '["a"]']),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}]}, ['["a", null]', "[]"], ['["a", null, 1]', "[1]"]),
    ({"type": "string", "minLength": 1, "maxLength": 3}, ['"a"', '"日本x"'], ['""', '"abcd"', '"\t"', '"\n"', '"\x01"', '"""', '"\\"']),
    ({"type": "string", "pattern": "^[a-z]{2}$"}, ['"ab"'], ['"abc"', '"a"']),
    ({"type": "string", "pattern": '[^"]+'}, ['"ab"'], ['"a\nb"', '"\x01"', '""']),
    ({"type": "string", "format": "date"}, ['"2025-01-31"'], ['"2025"']),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, ["3", "11"], ["2", "12", "3.0"]),
    ({"type": "integer", "multipleOf": 7}, ["0", "14", "-21"], ["15"]),
    ({"type": "number", "minimum": 0.5}, ["0.5", "2"], ["0.4", "-1"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["null", '"ab"'], ['"abc"', "1"]),
    ({"type": "string", "enum": ["a/b", 'é"', 3]}, ['"a/b"', '"é\\""'], ["3", '"c"']),
    ({"const": {"a": [1, None]}}, ['{"a":[1,null]}'], ['{"a":[1]}']),
    ({"enum": [1, 2, True], "const": 1.0}, ["1"], ["true", "2"]),
    ({"anyOf": [{"minLength": 2}, {"pattern": "^x$"}], "type": "string"}, ['"ab"', '"x"'], ['"y"', "1"]),
    ({"allOf": [{"type": "null"}], "description": "one"}, ["null"], ["1"]),
    ({"properties": {"a": True}}, ['{"a": [1]}'], ["1"]),
    ({"description": "anything", "x-mine": 1}, ["1", '"a"', "[{}]"], ["a"]),
    (TREE, ['{"next": {"next": null}}'], ['{"next": 1}', "null"]),
    ({"type": "array", "items": {"$ref": "#"}}, ["[[], [[]]]"], ["[1]"]),
    (UNION, ['{"kind": "cat", "n": 1}', '{"kind": "dog"}'], ['{"kind": "cow"}']),
    ({"oneOf": [{"type": "integer"}, {"enum": ["a", None]}, {"type": ["boolean", "array"]}]}, ["1", '"a"', "[]"], ['"b"', "{}"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "")
async def test_schemas(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, good: list[str], bad: list[str]) -> None:
    await check(compiler, tokenizer, "json_schema", schema, good, bad)


REFUSED: list[tuple[GuideKind, Any, str]] = [
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", '{"const": NaN}', "not valid JSON"),
    ("json_schema", [], "must be an object"),
    ("json_schema", {"not": {"type": "string"}}, "#: not is not supported"),
    ("json_schema", {"if": {}, "then": {}}, "#: if is not"),
    ("json_schema", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "#/properties/a: uniqueItems"),
    ("json_schema", {"type": "array", "contains": {}}, "contains"),
    ("json_schema", {"type": "number", "multipleOf": 0.1}, "multipleOf"),
    ("json_schema", {"type": "integer", "multipleOf": 2, "minimum": 3}, "multipleOf"),
    ("json_schema", {"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ("json_schema", {"$ref": "https://example.com/schema"}, r"\$ref must point into the schema"),
    ("json_schema", {"$ref": "#/$defs/none"}, r"\$ref must point into the schema"),
    ("json_schema", {"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {"type": "string"}}}, r"minLength beside \$ref"),
    ("json_schema", {"anyOf": [{"type": "object"}], "properties": {"a": {}}}, "properties beside anyOf"),
    ("json_schema", {"enum": ["a"], "minLength": 2}, "minLength beside enum"),
    ("json_schema", {"type": "string", "enum": [1]}, "no value"),
    ("json_schema", {"allOf": [{"type": "string"}, {"minLength": 2}]}, "allOf with several"),
    ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf may overlap"),
    ("json_schema", {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]}, "oneOf may overlap"),
    ("json_schema", {"type": "string", "pattern": "a", "maxLength": 2}, "pattern with maxLength"),
    ("json_schema", {"type": "string", "format": "iri"}, "format must be one of"),
    ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "Lookahead"),
    ("json_schema", {"type": "string", "pattern": "a$|^b"}, "is ignored"),
    ("json_schema", {"type": "string", "pattern": 'a"b'}, "pattern cannot be enforced"),
    ("json_schema", {"type": "string", "pattern": "é"}, "pattern cannot be enforced"),
    ("json_schema", {"type": "string", "pattern": r"(a)\1"}, "Backreference"),
    ("json_schema", {"type": "string", "minLength": 3, "maxLength": 2}, "."),
    ("json_schema", {"type": "string", "maxLength": -1}, "maxLength must be an integer"),
    ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}, "minimum greater than maximum"),
    ("json_schema", {"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": {}}}, "patternProperties"),
    ("json_schema", {"type": "object", "required": ["b"], "properties": {"a": {}}, "additionalProperties": False}, "'b' is required"),
    ("json_schema", {"type": "object", "required": ["b"], "properties": {"a": {}}}, "'b' is required"),
    ("json_schema", {"minLength": 2, "minItems": 2}, "type is missing"),
    ("json_schema", {"type": "text"}, "'text' is unknown"),
    ("json_schema", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "nothing that the model can write"),
    ("regex", "(a", "parenthesis is not closed"),
    ("regex", "(?!a)b", "Lookahead"),
    ("regex", "a$b", "is ignored"),
    ("grammar", "root ::= foo", '"foo" is not defined'),
    ("grammar", "", "."),
    ("choice", [], "non-empty array"),
    ("choice", ["a", 1], "array of strings"),
    ("choice", "x", "not valid JSON"),
    ("choice", ["\ud800"], "surrogate"),
]


@pytest.mark.parametrize(("kind", "spec", "reason"), REFUSED, ids=lambda value: json.dumps(value)[:50])
async def test_what_cannot_be_enforced_is_refused(compiler: GrammarCompiler, kind: GuideKind, spec: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await compiler.compile(Guide(kind, spec if isinstance(spec, str) else json.dumps(spec)))
    assert caught.value.param == "response_format"
    assert len(str(caught.value)) < 450
    assert "/project/" not in str(caught.value)


CATASTROPHES: list[tuple[GuideKind, str]] = [
    ("regex", "((a{1,1000}){1,1000})"),
    ("regex", "(((a{1,1000}){1,1000}){1,1000})"),
    ("regex", "(([a-z]{1,50} ?){1,50})"),
    ("regex", "(" * 20_000 + "a" + ")" * 20_000),
    ("grammar", 'root ::= ("a"{1,1000}){1,1000}'),
    ("grammar", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    ("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000),
    ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}})),
    ("json_schema", json.dumps({"type": "array", "items": {"type": "string", "maxLength": 2_000_000_000}, "minItems": 2_000_000_000})),
    ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}, "minProperties": 200})),
]


async def test_catastrophes_end_in_time_and_the_next_guide_compiles(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer_folder, VOCAB, (EOS,), timeout=2.0)
    try:
        await compiler.compile(Guide("json_object"))
        for kind, spec in CATASTROPHES:
            started = time.monotonic()
            try:
                await compiler.compile(Guide(kind, spec))
            except InvalidRequest as error:
                assert len(str(error)) < 450
            assert time.monotonic() - started < 30, spec[:60]  # the limit, a new start of the worker, and a slow machine
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
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "engine.embedded.grammar_worker" in child.cmdline()]


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
    import sys  # noqa: PLC0415

    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "engine.embedded.grammar_worker", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
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


async def test_special_and_padding_ids_are_never_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    options = allowed((await compiler.compile(Guide("regex", r"[\s\S]+"))).matcher())
    assert len(options) > 200
    assert not options & {0, 1, EOS, SPECIAL, *range(tokenizer.get_vocab_size(), VOCAB)}
    choice = await compiler.compile(Guide("choice", '["<|special|>"]'))
    assert SPECIAL not in allowed(choice.matcher())


async def test_after_the_end_only_the_end_is_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = (await compiler.compile(Guide("choice", '["a"]'))).matcher()
    matcher.accept(tokenizer.token_to_id("a"))
    for _ in range(3):
        assert allowed(matcher) == {EOS}
        matcher.accept(EOS)
        assert matcher.finished
    assert not matcher.error


@pytest.mark.parametrize(
    "schema", [PERSON, UNION, TREE, {"type": "object", "additionalProperties": {"type": "number"}}], ids=lambda s: str(s)[:40]
)
async def test_whatever_the_masks_let_through_is_json(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any) -> None:
    guide = await compiler.compile(Guide("json_schema", json.dumps(schema)))
    finished = [text for seed in range(15) if (text := generate(guide, tokenizer, seed)) is not None]
    assert finished
    for text in finished:
        value = json.loads(text)
        assert isinstance(value, dict)
        if schema is PERSON:
            assert isinstance(value["name"], str) and isinstance(value.get("age", 0), int) and value.keys() <= {"name", "age"}
        if schema is UNION:
            assert value["kind"] in ("cat", "dog")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_the_sampler_follows_the_grammar_beside_free_rows(
    compiler: GrammarCompiler, tokenizer: Tokenizer, temperature: float
) -> None:
    """A guided row, with everything else pulling away from the grammar, in a batch with unguided ones."""
    pattern = r"[0-9]{3}-(yes|no)"
    guide = await compiler.compile(Guide("regex", pattern))
    cpu, sampler = torch.device("cpu"), Sampler(VOCAB, torch.device("cpu"))
    torch.manual_seed(0)
    for seed in range(10):
        sampling = SamplingParams(max_tokens=50, temperature=temperature, top_p=0.9, logit_bias={SPECIAL: 100.0, EOS: -100.0}, min_tokens=2)
        guided = SamplerState(sampling, [1], (EOS,), seed, guide.matcher(), VOCAB, cpu)
        free = SamplerState(SamplingParams(max_tokens=50, temperature=0), [1], (EOS,), seed, None, VOCAB, cpu)
        output = list[int]()
        while not output or output[-1] != EOS:
            logits = torch.randn(3, VOCAB)
            best = int(logits[0].argmax())
            sampled = sampler.sample(logits, [free, guided, free])
            assert sampled[0].token_id == best
            output.append(sampled[1].token_id)
            guided.accept(output[-1])
        assert re.fullmatch(pattern, tokenizer.decode(output[:-1], skip_special_tokens=False))
        assert not guided.error


async def test_a_finished_grammar_beats_min_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    guide = await compiler.compile(Guide("choice", '["a"]'))
    sampling = SamplingParams(max_tokens=9, temperature=0, min_tokens=5)
    state = SamplerState(sampling, [1], (EOS,), 0, guide.matcher(), VOCAB, torch.device("cpu"))
    state.accept(tokenizer.token_to_id("a"))
    assert Sampler(VOCAB, torch.device("cpu")).sample(torch.randn(1, VOCAB), [state])[0].token_id == EOS


async def test_a_grammar_that_grows_too_slow_reports_itself(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = (await compiler.compile(Guide("regex", "a+"))).matcher()
    matcher._allowance = 0.0
    allowed(matcher)
    assert "too ambiguous" in matcher.error
    assert allowed(matcher) == {EOS}
