"""Guided decoding: what grammars allow and forbid, and how the sampler follows them."""

import json
import math
import re
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.embedded.grammar.compiler import GrammarCompiler, Matcher, fill_bitmask, new_bitmask
from engine.embedded.sampling import penalties, sampler
from engine.embedded.sampling.sampler import Sampler
from engine.embedded.sampling.state import SamplerState
from engine.errors import InvalidRequest
from engine.types import Guide, GuideKind, SamplingParams
from tests.support.grammar import EOS, SPECIAL, VOCAB, allowed, check, compiler, started, tokenizer, tokenizer_folder

__all__ = ["compiler", "tokenizer", "tokenizer_folder"]  # fixtures

CPU = torch.device("cpu")

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
CALL = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": {"type": "object"}},
    "end": "</f>",
}
CALLS = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [CALL]}}
KINDS.append(("structural_tag", CALLS, ["", "é", 'x<f>{"a": 1}</f>y<f>{}</f>'], ["<f>", "<f>1</f>", "<f>{</f>"]))
KINDS.append(("structural_tag", CALLS, [], ['<f>{"a":' + " " * 17 + "1}</f>"]))


def text_in_json(syntax: str, definition: str, *texts: str) -> tuple[GuideKind, Any, list[str], list[str]]:
    """A tag whose text has a grammar: `texts` as JSON writes them fit, and otherwise do not."""
    text = {"type": "text_grammar", "syntax": syntax, "definition": definition, "json": True}
    tag = {"type": "tag", "begin": '{"input": "', "content": text, "end": '"}'}
    good = [json.dumps({"input": each}, ensure_ascii=False) for each in texts]
    bad = [f'{{"input": "{each}"}}' for each in texts if json.dumps(each, ensure_ascii=False)[1:-1] != each]
    return "structural_tag", {"type": "structural_tag", "format": tag}, good, bad


PATCH = """start: "*** Begin" LF change+ "*** End"
change: ("+" | "-") /(.*)/ LF -> line
%import common.LF"""
SUM = 'start: sum\nsum: INT ("+" (INT | "(" sum ")"))*\n%import common.INT\n%import common.WS\n%ignore WS'
KINDS += [
    text_in_json("lark", PATCH, '*** Begin\n+x = "é\\n"\t🙂\n-\x01\n*** End'),
    text_in_json("lark", SUM, "1 +\n(2+ 3)", "1"),
    text_in_json("regex", '[^x]*"\\n', 'ab\\c"\n', '"\n'),
    text_in_json("regex", r"[\s\S]+", 'a\n"\\'),
    text_in_json("regex", r"[a\-z]{2,3}", "a-z"),
    text_in_json("regex", r"\[\^[a^]", "[^^"),
    (*text_in_json("regex", r"[^x\n]+")[:2], [], ['{"input": "x"}', r'{"input": "\n"}', '{"input": ""}']),
    (*text_in_json("lark", PATCH)[:2], [], ['{"input": "*** Begin"}', r'{"input": "*** Begin\n*** End"}']),
]


@pytest.mark.parametrize(
    ("kind", "spec", "good", "bad"), KINDS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_kinds(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: GuideKind, spec: Any, good: list[str], bad: list[str]
) -> None:
    await check(compiler, tokenizer, kind, spec, good, bad)


async def test_special_tokens_that_a_tag_has_are_allowed_there(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    tag = {"type": "tag", "begin": "<|special|>", "content": {"type": "regex", "pattern": "a"}, "end": "<|special|>"}
    guide = await compiler.compile(Guide("structural_tag", json.dumps({"type": "structural_tag", "format": tag})))
    matcher = started(guide)
    assert SPECIAL in allowed(matcher)
    (letter,) = tokenizer.encode("a", add_special_tokens=False).ids
    for token in (SPECIAL, letter, SPECIAL, EOS):
        assert token in allowed(matcher) and (token != letter or SPECIAL not in allowed(matcher))
        matcher.accept(token)
    assert matcher.finished
    other = await compiler.compile(Guide("structural_tag", json.dumps(CALLS)))
    assert SPECIAL not in allowed(started(other))


REFUSED: list[tuple[GuideKind, Any, str]] = [
    ("regex", "(a", "unclosed group"),
    ("regex", "(?!a)b", "look-around"),
    ("regex", "a$b", "only around a whole"),
    ("grammar", "root ::= foo", '"foo" is not defined'),
    ("grammar", "", "."),
    ("structural_tag", {"type": "structural_tag", "format": {"type": "nonsense"}}, "."),
    (*text_in_json("lark", "start: nothing")[:2], "the grammar is not supported: .*unknown name 'nothing'"),
    (*text_in_json("lark", "start: /a(?=b)/")[:2], "Lookahead is not supported"),
    (*text_in_json("regex", r"\\[\^a]")[:2], "put it last"),
    (*text_in_json("lark", "start: /ab/i")[:2], "which a tool's input cannot have"),
    ("choice", [], "non-empty array"),
    ("choice", ["a", 1], "array of strings"),
    ("choice", "x", "not valid JSON"),
    ("choice", ["\ud800"], "surrogate"),
]


@pytest.mark.parametrize(("kind", "spec", "reason"), REFUSED, ids=lambda value: json.dumps(value)[:50])
async def test_guides_that_cannot_be_enforced_are_refused(
    compiler: GrammarCompiler, kind: GuideKind, spec: Any, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await compiler.compile(Guide(kind, spec if isinstance(spec, str) else json.dumps(spec)))
    assert caught.value.param == "guide"
    assert len(str(caught.value)) < 450
    assert "/project/" not in str(caught.value)


async def test_special_and_padding_ids_are_never_allowed(
    compiler: GrammarCompiler, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    options = allowed(started(await compiler.compile(Guide("regex", r"[\s\S]+"))))
    assert len(options) > 200
    assert not options & {0, 1, EOS, SPECIAL, *range(tokenizer.get_vocab_size(), VOCAB)}
    text = started(await compiler.compile(Guide("grammar", "root ::= [^x]*")))
    assert not allowed(text) & {0, 1, SPECIAL, *range(tokenizer.get_vocab_size(), VOCAB)}
    assert capfd.readouterr().err == ""
    choice = await compiler.compile(Guide("choice", '["<|special|>"]'))
    assert SPECIAL not in allowed(started(choice))


async def test_after_the_end_only_the_end_is_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = started(await compiler.compile(Guide("choice", '["a"]')))
    matcher.accept(tokenizer.token_to_id("a"))
    for _ in range(3):
        assert allowed(matcher) == {EOS}
        matcher.accept(EOS)
        assert matcher.finished
    assert not matcher.error


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
        sampling = SamplingParams(
            max_tokens=50, temperature=temperature, top_p=0.9, logit_bias={SPECIAL: 100.0, EOS: -100.0}, min_tokens=2
        )
        guided = SamplerState(sampling, [1], (EOS,), seed, started(guide), VOCAB, cpu)
        free = SamplerState(SamplingParams(max_tokens=50, temperature=0), [1], (EOS,), seed, None, VOCAB, cpu)
        output = list[int]()
        while not output or output[-1] != EOS:
            logits = torch.randn(3, VOCAB)
            best = int(logits[0].argmax())
            sampled = sampler.sample(logits, [free, guided, free])
            assert sampled[0].token_ids == (best,)
            output += sampled[1].token_ids
            guided.accept(output[-1])
        assert re.fullmatch(pattern, tokenizer.decode(output[:-1], skip_special_tokens=False))
        assert not guided.error


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_grammar_beats_what_contradicts_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, temperature: float
) -> None:
    """Bad words, allowed tokens, and a logits processor that leaves nothing."""
    guide, only = await compiler.compile(Guide("choice", '["a"]')), tokenizer.token_to_id("a")
    for options in ({"bad_words": ((only,),)}, {"allowed_token_ids": (only + 1,)}, {}):
        sampling = SamplingParams(max_tokens=9, temperature=temperature, **options)
        state = SamplerState(sampling, [1], (EOS,), 0, started(guide), VOCAB, torch.device("cpu"))
        if not options:
            state.processors = [lambda _, logits: logits.fill_(-math.inf)]
        assert Sampler(VOCAB, torch.device("cpu")).sample(torch.randn(1, VOCAB), [state])[0].token_ids == (only,)


async def test_a_finished_grammar_beats_min_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    guide = await compiler.compile(Guide("choice", '["a"]'))
    sampling = SamplingParams(max_tokens=9, temperature=0, min_tokens=5)
    state = SamplerState(sampling, [1], (EOS,), 0, started(guide), VOCAB, torch.device("cpu"))
    state.accept(tokenizer.token_to_id("a"))
    assert Sampler(VOCAB, torch.device("cpu")).sample(torch.randn(1, VOCAB), [state])[0].token_ids == (EOS,)


@pytest.mark.parametrize(
    "values", [{"temperature": 0}, {"seed": 5}, {"temperature": 0, "frequency_penalty": 1.0, "logit_bias": {70: 4.0}}]
)
async def test_tokens_drawn_before_a_mask_are_those_drawn_behind_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, values: dict[str, Any]
) -> None:
    """Greedy tokens and those of a seed: also where the grammar refuses the first choice, about every other time."""
    guide, draws = await compiler.compile(Guide("regex", r"[ -~]+")), Sampler(VOCAB, CPU)
    sampling, refused = SamplingParams(**{"max_tokens": 200, "temperature": 1, **values}), 0
    guided = SamplerState(sampling, [1], (EOS,), 5, started(guide), VOCAB, CPU)
    plain = SamplerState(sampling, [1], (EOS,), 5, None, VOCAB, CPU)
    torch.manual_seed(0)
    for _ in range(100):
        logits = torch.randn(1, VOCAB) * 3
        assert guided.matcher is not None
        options = allowed(guided.matcher) - {EOS}
        logits[0, EOS] = -math.inf
        masked = logits.clone()
        masked[0, [token for token in range(VOCAB) if token not in options]] = -math.inf
        refused += draws.sample(logits.clone(), [plain]) != draws.sample(masked.clone(), [plain])
        (found,) = draws.sample(logits, [guided])
        assert [found] == draws.sample(masked, [plain])
        guided.accept(found.token_ids[0])
        plain.accept(found.token_ids[0])
    assert 20 < refused < 80


async def test_draws_of_a_grammar_follow_the_exact_distribution(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three quarters of first draws are refused; second draws follow the masked distribution."""
    guide, draws = await compiler.compile(Guide("regex", "[a-h]")), 4_000
    options = sorted(allowed(started(guide)))
    torch.manual_seed(2)
    logits = torch.randn(VOCAB)
    others = [token for token in range(VOCAB) if token not in options]
    logits[options] += float(logits[others].logsumexp(0) - logits[options].logsumexp(0)) - math.log(3)
    masks: list[int] = []

    def guided(part: torch.Tensor, states: list[SamplerState]) -> None:
        masks.append(len(states))
        penalties.guide(part, states)

    monkeypatch.setattr(sampler, "guide", guided)
    one = SamplingParams(max_tokens=9, temperature=1)
    states = [SamplerState(one, [1], (EOS,), seed, started(guide), VOCAB, CPU) for seed in range(draws)]
    found = [each.token_ids[0] for each in Sampler(VOCAB, CPU).sample(logits.repeat(draws, 1), states)]
    expected = (logits[options].double().softmax(0) * draws).tolist()
    chi_square = sum((found.count(token) - mean) ** 2 / mean for token, mean in zip(options, expected, strict=True))
    assert set(found) <= set(options)
    assert chi_square < 24.4  # the 99.9th percentile for 7 degrees of freedom, and less for fewer
    assert sum(masks) == pytest.approx(draws * 3 / 4, rel=0.1)


async def test_a_token_that_the_grammar_allows_needs_no_mask(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Matcher, "fill", lambda *_: pytest.fail("a mask was computed"))
    guide, logits = await compiler.compile(Guide("regex", "a+")), torch.zeros(1, VOCAB)
    logits[0, tokenizer.token_to_id("a")] = 50.0
    for values in ({"temperature": 0}, {"temperature": 1}, {"temperature": 1, "seed": 3}):
        state = SamplerState(SamplingParams(max_tokens=9, **values), [1], (EOS,), 0, started(guide), VOCAB, CPU)
        assert Sampler(VOCAB, CPU).sample(logits.clone(), [state])[0].token_ids == (tokenizer.token_to_id("a"),)


async def test_a_grammar_that_grows_too_slow_reports_itself(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = started(await compiler.compile(Guide("regex", "a+")))
    matcher.allowance = 0.0
    allowed(matcher)
    assert "too ambiguous" in matcher.error
    assert allowed(matcher) == {EOS}


@pytest.mark.parametrize("slow", [False, True])
async def test_masks_of_many_are_those_of_each(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """Several threads fill most rows: those of one library, unless masks took long, so that each is timed alone."""
    monkeypatch.setattr("engine.embedded.grammar.compiler._SLOW_SECONDS", -1.0 if slow else 60.0)
    guides = [Guide("regex", "[a-z]+1"), Guide("json_object", ""), Guide("grammar", 'root ::= "(" root ")" | [0-9]')]
    compiled = [await compiler.compile(guide) for guide in guides]

    def matchers() -> dict[int, Matcher]:
        found = {row: started(compiled[row % 2]) for row in range(20)} | {25: started(compiled[2])}
        for token in [*tokenizer.encode("a1", add_special_tokens=False).ids, EOS]:
            found[4].accept(token)
        found[6].error = "it failed before"
        return found

    together, alone = matchers(), matchers()
    for step in range(3):
        expected, found = new_bitmask(27, VOCAB), new_bitmask(27, VOCAB)
        for row, matcher in alone.items():
            matcher.fill(expected, row)
        assert (together[0].shared is None) == (slow and step > 0) and together[25].shared is None
        fill_bitmask(found, together)
        assert torch.equal(found, expected)
        token = tokenizer.token_to_id("a")
        for row in range(0, 20, 2):
            assert together[row].accept(token) and alone[row].accept(token)
