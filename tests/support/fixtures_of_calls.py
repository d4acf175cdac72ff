"""canitoolcall's fixtures, real outputs of models with the parts they have, read by our parsers."""

import random
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import ChunkStrategy, split
from canitoolcall.fixtures import Family as Format
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status
from tokenizers import AddedToken

from multimodal.answers.parsers.choose import family
from multimodal.answers.parsers.engine import FamilyParser
from multimodal.answers.parts import Part, Reasoning, Text
from multimodal.text.tokenizer import Detokenizer, Tokenizer, byte_tokenizer

FIXTURES = {fixture.id: fixture for fixture in load_fixtures()}
FORMATS = load_families()

# The parsers that the makers of the models name.
PARSERS: tuple[tuple[str, str | None, str | None], ...] = (
    (r"gpt-oss", "gpt_oss", "gpt_oss"),
    (r"Qwen3-.*Instruct-2507", "hermes", None),
    (r"Qwen3-Coder", "qwen3_coder", None),
    (r"Qwen3\.[5-9]", "qwen3_coder", "qwen3"),
    (r"Qwen3", "hermes", "qwen3"),
    (r"DeepSeek-V4\.1", "deepseek_v41", "deepseek_v41"),
    (r"DeepSeek-V4", "deepseek_v4", "deepseek_v4"),
    (r"DeepSeek-V3\.2", "deepseek_v32", "deepseek_v3"),
    (r"DeepSeek-V3\.1", "deepseek_v31", "deepseek_v3"),
    (r"DeepSeek-V3", "deepseek_v3", None),
    (r"Kimi-K3", "kimi_k3", "kimi_k3"),
    (r"Kimi-K2-Instruct", "kimi_k2", None),
    (r"Kimi-K2", "kimi_k2", "kimi_k2"),
    (r"GLM-4\.5", "glm45", "glm45"),
    (r"GLM", "glm47", "glm45"),
    (r"Llama-4", "llama4_pythonic", None),
    (r"Llama-3", "llama3_json", None),
    (r"istral|evstral", "mistral", "mistral"),
    (r"gemma-4", "gemma4", "gemma4"),
)

# The project's rule is that a call which never completes comes out as text, so that nothing the model wrote is lost;
# these fixtures expect it to vanish if an earlier call completed.
JUDGED_WRONG = {
    "deepseek/v32-truncated-second-parallel-call",
    "deepseek/v4-truncated-second-parallel-call",
    "deepseek/v41-truncated-second-parallel-call",
    "gemma4/truncated-second-parallel-call",
    "qwen3-hermes/truncated-second-parallel-call",
}
# Equal but for white space: another fixture of the family expects the opposite of the same output.
CONTRADICTED = {"gemma4/vllm-text-before-call"}


def parsers_of(fixture: Fixture) -> tuple[str | None, str | None]:
    """Return the names of the tool parser and the reasoning parser."""
    return next(names for pattern, *names in PARSERS if re.search(pattern, fixture.reference_model))


def parser_of(fixture: Fixture, **arguments: object) -> FamilyParser:
    """Return a parser for the output of a fixture, at the end of its prompt."""
    prompt = fixture.generation_prompt
    if prompt is None:
        model = FORMATS[fixture.family].reference_for(fixture.reference_model)
        prompt = (model and model.default_generation_prompt) or ""
    tools = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in fixture.tools}
    return FamilyParser(family(*parsers_of(fixture)), tools, prompt=prompt, **arguments)  # type: ignore[arg-type]


def result(parts: Iterable[Part]) -> ParseResult:
    """Return parts as canitoolcall compares them. Asserts that calls are numbered and named once."""
    texts, thoughts = [], []
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        if isinstance(part, Text):
            texts.append(part.text)
        elif isinstance(part, Reasoning):
            thoughts.append(part.text)
        elif part.index == len(calls):
            assert part.name and part.id
            calls.append((part.name, [part.arguments]))
        else:
            assert part.index == len(calls) - 1
            assert part.name is part.id is None
            calls[-1][1].append(part.arguments)
    return ParseResult(
        content="".join(texts) or None,
        reasoning_content="".join(thoughts) or None,
        tool_calls=tuple(ParsedToolCall(name, "".join(arguments)) for name, arguments in calls),
    )


def from_text(fixture: Fixture, pieces: Sequence[str], **arguments: object) -> ParseResult:
    """Parse text without token ids."""
    parser = parser_of(fixture, **arguments)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed((), piece)
    return result(parts + parser.finish())


def from_ids(fixture: Fixture, groups: Sequence[Sequence[int]], skip: bool, **arguments: object) -> ParseResult:
    """Parse token ids and the text that a detokenizer makes of them."""
    tokenizer = tokenizer_of(FORMATS[fixture.family])
    detokenizer = Detokenizer(tokenizer, skip)
    parser = parser_of(fixture, tokenizer=tokenizer, skip_special_tokens=skip, **arguments)
    parts: list[Part] = []
    for group in groups:
        parts += parser.feed(group, detokenizer.feed(group))
    parts += parser.feed((), detokenizer.flush())
    return result(parts + parser.finish())


@lru_cache(maxsize=1)
def tokenizer_of(form: Format) -> Tokenizer:
    """Return a tokenizer that has a family's markers as special tokens, and bytes."""
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in form.markers])
    return Tokenizer(backend, {})


def words(fixture: Fixture) -> list[str]:
    """Return an output in pieces like a tokenizer's: markers are whole."""
    markers = sorted(FORMATS[fixture.family].markers, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, markers), r"\s?\w{1,5}", "."])
    return re.findall(pattern, fixture.raw_output, re.DOTALL)


def chunks(fixture: Fixture, strategy: ChunkStrategy) -> list[str]:
    """Return an output as one of canitoolcall's strategies cuts it."""
    if strategy.kind == "char":
        return ["".join(group) for group in split(list(fixture.raw_output), strategy)]
    special = set(FORMATS[fixture.family].markers)
    return ["".join(group) for group in split(words(fixture), strategy, special=special)]


def judge(fixture: Fixture, whole: ParseResult, streams: dict[str, ParseResult]) -> tuple[Status, list[str]]:
    """Return canitoolcall's status and what is wrong."""
    rows = run_checks(fixture, FORMATS[fixture.family], Observation(nonstream=whole, streams=streams))
    wrong = [f"{row.check} {row.strategy}: {row.detail}" for row in rows if row.status is not Status.PASS]
    return case_status(rows), wrong


def passes(fixture: Fixture, whole: ParseResult, streams: dict[str, ParseResult]) -> None:
    """Assert that a fixture passes, if it is not judged wrong."""
    status, wrong = judge(fixture, whole, streams)
    if fixture.id in JUDGED_WRONG:
        assert status is Status.FAIL, "passes: it is no longer to be listed"
        assert not [row for row in wrong if not row.startswith(("expected_match", "no_leakage"))], wrong
    else:
        assert status is (Status.SOFT_PASS if fixture.id in CONTRADICTED else Status.PASS), wrong


def random_groups(ids: Sequence[int], seed: int) -> list[list[int]]:
    """Return ids in groups of 1 to 8."""
    chance, groups, start = random.Random(seed), [], 0
    while start < len(ids):
        size = chance.randint(1, 8)
        groups.append(list(ids[start : start + size]))
        start += size
    return groups
