"""Every sampling parameter is honoured or refused with the setting that decides, in each version and with each sampler.

The stand-in ignores what TensorRT-LLM ignores, so that an engine that only passed parameters on would fail here.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EmbeddedConfig, TrtllmConfig
from engine.create import create_engine
from engine.errors import EngineFailure, InvalidRequest
from engine.trtllm import library
from engine.trtllm.arguments import guided_backends
from engine.trtllm.engine import TrtllmEngine
from engine.trtllm.sampling import MASKED
from engine.trtllm.support import COLUMNS, TABLE, Support, column_of, markdown
from engine.types import GUIDE_KINDS, Guide, ReasoningBudget, SamplingParams
from server.cli import main
from server.compose.config import engine_config
from server.compose.engine_args import effective
from server.settings import EngineArgsError, read_settings
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.engine_cases import EMBEDDED, collect, request_for, tokens_of
from tests.support.trtllm import BOTH_VERSIONS, NEWEST, OLDEST, PROMPT, registered, sampling
from tests.support.trtllm_gotchas import request, running, tokens

trt, folder, calls = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder, trtllm_gotchas_support.calls  # fixtures
ROOT = Path(__file__).resolve().parents[3]
MTP = {"decoding_type": "MTP"}
NGRAM = {"decoding_type": "NGram", "max_draft_len": 2, "max_matching_ngram_size": 2}
ARGUMENTS: list[dict[str, Any]] = [
    {}, {"sampler_type": "TRTLLMSampler"}, {"speculative_config": NGRAM}, {"speculative_config": MTP},
    {}, {"speculative_config": NGRAM}, {"speculative_config": MTP},
]  # fmt: skip
"""Arguments for each column of the table."""
ASKING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_p": {"temperature": 0.5, "top_p": 0.5},
    "top_k": {"temperature": 0.5, "top_k": 5},
    "min_p": {"temperature": 0.5, "min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": -0.5},
    "seed": {"temperature": 0.5, "seed": 0},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": (5,)},
    "bad_words": {"bad_words": ((5, 6),)},
    "min_tokens": {"min_tokens": 1, "stop_token_ids": (9,)},
    "logprobs": {"logprobs": 2},
    "processors": {"processors": ("name",)},
    "reasoning_budget": {"reasoning_budget": ReasoningBudget(3, (4,))},
}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **fields})


def split(support: Support, num_prompt: int | None = 3, **fields: Any) -> Any:
    return support.split(params(**fields), (2,), num_prompt)


@pytest.mark.parametrize("number", range(len(COLUMNS)))
@pytest.mark.parametrize("name", TABLE)
def test_each_parameter_is_honoured_or_refused_by_name(number: int, name: str) -> None:
    column = COLUMNS[number]
    arguments = {"disable_overlap_scheduler": True, **ARGUMENTS[number]}
    assert column_of(arguments, newer=column.newer) == column
    native = Support(arguments, newer=column.newer)
    way = TABLE[name][number]
    assert (name in native.refused) == (way != "yes")
    if way == "yes":
        left, edits = split(native, **ASKING[name])
        assert (edits is None) == (name != "processors")
        assert left == params(**ASKING[name]) or edits is not None
        return
    with pytest.raises(InvalidRequest, match=r"TensorRT-LLM") as caught:
        split(native, **ASKING[name])
    assert caught.value.param in (name, "temperature") and ("1.3" if column.newer else "1.2.1") in str(caught.value)
    with_processors = Support(arguments, newer=column.newer, processors=True)
    if TABLE["processors"][number] == "yes" and name != "logprobs":
        assert "TRTLLM_SAMPLING=processors" in str(caught.value)
        left, edits = split(with_processors, **ASKING[name])
        assert edits.sampling == params(**ASKING[name]) and name not in with_processors.refused
        assert getattr(left, name) == getattr(SamplingParams(max_tokens=8), name), "nothing is done twice"
    else:
        with pytest.raises(InvalidRequest):
            split(with_processors, **ASKING[name])


def test_the_reason_names_what_decides() -> None:
    def reason(arguments: dict[str, Any], **fields: Any) -> str:
        with pytest.raises(InvalidRequest) as caught:
            split(Support(arguments), **fields)
        return str(caught.value)

    assert reason({}, seed=3, temperature=1.0) == (
        "TensorRT-LLM 1.2.1's TorchSampler does not honour 'seed'; set TRTLLM_SAMPLING=processors or the argument "
        "sampler_type: TRTLLMSampler"
    )
    assert "this speculative_config" in reason({"speculative_config": MTP}, logit_bias={3: 1.0})
    assert "allow_advanced_sampling" in reason({"speculative_config": MTP}, temperature=1.0)
    assert "disable_overlap_scheduler" in reason({}, processors=("name",))


def test_parameters_without_effect_are_not_refused() -> None:
    """Greedy requests with the parameters of a draw, and neutral values."""
    for fields in ({"seed": 3, "min_p": 0.5, "top_p": 0.1}, {"temperature": 0.7, "top_k": 1, "seed": 3}, {}):
        assert split(Support({}), **fields) == (params(**fields), None)
    assert split(Support({"speculative_config": MTP}), top_p=0.3, seed=4)[1] is None
    assert split(Support({}), min_tokens=3, ignore_eos=True)[0].min_tokens == 0, "no id ends it"


def test_the_torch_sampler_does_more_than_it_says() -> None:
    """Bad words of one token become a bias, and `min_tokens` of 1.2.1 counts the prompt."""
    left, edits = split(Support({}), bad_words=((4,), (5,)), logit_bias={5: 7.0, 6: 1.0}, min_tokens=2)
    assert edits is None and left.logit_bias == {4: MASKED, 5: MASKED, 6: 1.0} and not left.bad_words
    assert left.min_tokens == 5 and split(Support({}, newer=True), min_tokens=2)[0].min_tokens == 2
    assert split(Support({"sampler_type": "TRTLLMSampler"}), min_tokens=2)[0].min_tokens == 2
    for fields in ({"stop_token_ids": (9,)}, {"ignore_eos": True, "stop_token_ids": (9,)}):
        with pytest.raises(InvalidRequest, match="min_tokens"):
            split(Support({}), min_tokens=2, **fields)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        split(Support({}), num_prompt=None, min_tokens=2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 1.2, "logprobs": 0}, "logprobs"),
        ({"processors": ("name",), "logprobs": 3}, "logprobs"),
        ({"seed": 4, "temperature": 1.0, "guide": Guide("json_object")}, "seed"),
        ({"min_p": 0.4, "temperature": 1.0, "guide": Guide("json_object")}, "min_p"),
    ],
)
def test_combinations_that_processors_cannot_do_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        split(Support({"disable_overlap_scheduler": True}, processors=True), **fields)
    assert caught.value.param == param


def test_the_documents_have_the_table() -> None:
    assert markdown() in (ROOT / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")


# On the stand-in.


@contextlib.asynccontextmanager
async def embedded(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> AsyncIterator[TrtllmEngine]:
    """TensorRT-LLM, computing with the embedded engine."""
    monkeypatch.setenv("FAKE_TRTLLM_ENGINE", "embedded")
    monkeypatch.setenv("FAKE_TRTLLM_CONFIG", json.dumps({**EMBEDDED, "num_blocks": 64}))
    async with TrtllmEngine(TrtllmConfig(model=str(tiny_model), **config)) as engine:
        yield engine


async def answer(engine: Any, **fields: Any) -> list[int]:
    return tokens_of(await collect(engine.generate(request_for(tuple(PROMPT), **{"max_tokens": 12, **fields}))))


HOT = {"temperature": 1.5, "seed": 11, "top_p": 0.9}
ASKED: list[dict[str, Any]] = [
    HOT,
    {**HOT, "min_p": 0.01, "top_k": 60},
    {"repetition_penalty": 1.8, "logit_bias": {40: 2.0}},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5, "min_tokens": 4, "stop_token_ids": (41, 42)},
    {**HOT, "ignore_eos": False, "min_tokens": 12, "logit_bias": {2: 50.0}},
]


@BOTH_VERSIONS
async def test_processors_give_what_the_embedded_engine_gives(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over whole requests, with prompts in chunks; and bad words that the plain answer has."""
    arguments = {"disable_overlap_scheduler": True, "enable_chunked_prefill": True, "max_num_tokens": 2}
    reference = create_engine(EmbeddedConfig(model=str(tiny_model), **{**EMBEDDED, "num_blocks": 64}))
    await reference.start()
    try:
        async with embedded(tiny_model, monkeypatch, arguments=arguments, sampling="processors") as engine:
            assert engine.info.refused_parameters == ()
            plain = await answer(reference)
            for fields in (*ASKED, {"bad_words": (tuple(plain[2:4]), (plain[5],))}):
                expected = await answer(reference, **fields)
                assert await answer(engine, **fields) == expected != plain, fields
    finally:
        await reference.close()


@pytest.mark.parametrize(("trt", "sampler"), [(OLDEST, "TRTLLMSampler"), (NEWEST, "TorchSampler")], indirect=["trt"])
async def test_samplers_that_honour_parameters_give_what_the_embedded_engine_gives(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """Without processors: what the engine gets means the same to it, which counts prompts in two of the penalties."""
    reference = create_engine(EmbeddedConfig(model=str(tiny_model), **{**EMBEDDED, "num_blocks": 64}))
    await reference.start()
    try:
        async with embedded(tiny_model, monkeypatch, arguments={"sampler_type": sampler}) as engine:
            for fields in (
                HOT | {"min_p": 0.01},
                {"repetition_penalty": 1.8},
                {"presence_penalty": 3.0, "min_tokens": 4},
            ):
                prompt = tuple(await answer(reference))  # which the answers would repeat
                wanted = {"max_tokens": 12, **fields}
                expected, found = [
                    tokens_of(await collect(each.generate(request_for(prompt, **wanted))))
                    for each in (reference, engine)
                ]
                assert found == expected, fields
            with pytest.raises(InvalidRequest, match="bad_words"):
                await answer(engine, bad_words=((4, 5),))
    finally:
        await reference.close()


async def test_the_stand_in_ignores_what_the_torch_sampler_ignores(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passed on as they are, without this server's checks: the TRTLLMSampler honours them."""
    ignored = {
        "repetition_penalty": 1.8, "presence_penalty": 2.0, "frequency_penalty": 2.0, "bad_token_ids": [5, 42, 250],
    }  # fmt: skip

    async def output(engine: TrtllmEngine, **fields: Any) -> list[int]:
        result = engine.llm.generate_async(PROMPT, sampling(ignore_eos=True, **fields))
        return list((await result).outputs[0].token_ids)

    async with embedded(tiny_model, monkeypatch) as engine:
        plain = await output(engine)
        assert await output(engine, **ignored) == plain
        hot = [await output(engine, temperature=2.0, seed=3) for _ in range(3)]
        assert hot[0] != hot[1] != hot[2], "one generator for all requests"
    async with embedded(tiny_model, monkeypatch) as engine:
        assert [await output(engine), await output(engine, **ignored)] == [plain, plain]
        assert [await output(engine, temperature=2.0) for _ in range(3)] == hot, "whose seed is always the same"
    async with embedded(tiny_model, monkeypatch, arguments={"sampler_type": "TRTLLMSampler"}) as engine:
        assert await output(engine, **ignored) != plain
        assert await output(engine, temperature=2.0, seed=3) == await output(engine, temperature=2.0, seed=3)
        result = await engine.llm.generate_async(PROMPT, sampling(logprobs=3))
        assert {len(entry) for entry in result.outputs[0].logprobs} == {1}


async def test_the_stand_in_counts_min_tokens_as_1_2_1_does(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = torch.zeros(384)
    bias[2] = 100.0

    async def length(engine: TrtllmEngine, **fields: Any) -> int:
        wanted = {"embedding_bias": bias, "max_tokens": 20, "include_stop_str_in_output": True, **fields}
        return len((await engine.llm.generate_async(PROMPT, sampling(**wanted))).outputs[0].token_ids)

    async with embedded(tiny_model, monkeypatch) as engine:
        assert await length(engine, min_tokens=3) <= 1, "the prompt has three tokens"
        assert await length(engine, min_tokens=7) > 3
        both = bias.clone()
        both[9] = 100.0
        assert await length(engine, min_tokens=9, stop_token_ids=[9], embedding_bias=both) <= 1, "only the end id"
        last = torch.zeros(384)
        last[383] = 100.0
        result = engine.llm.generate_async(
            PROMPT, sampling(embedding_bias=last, min_tokens=6, max_tokens=6, ignore_eos=True, end_id=-1)
        )
        assert list((await result).outputs[0].token_ids)[3:] == [383] * 3, "the last id of the vocabulary is masked"
    assert [await answered(tiny_model, monkeypatch, min_tokens=5)] == [[False] * 5 + [True]]


async def answered(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> list[bool]:
    """Which tokens of an answer are the end, which is what the model wants."""
    async with embedded(tiny_model, monkeypatch) as engine:
        made = await answer(engine, ignore_eos=False, logit_bias={2: 100.0}, max_tokens=20, **fields)
    return [token == 2 for token in made]


class Counts:
    """Forces the number of tokens that it sees, plus 100."""

    def __call__(self, token_ids: Any, logits: Any) -> None:
        logits.fill_(-torch.inf)
        logits[100 + len(token_ids)] = 0


async def test_processors_need_the_true_sequence(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the overlap scheduler the stand-in shows them one token less, as 1.2.1 does."""
    with registered(counts=Counts):
        async with embedded(tiny_model, monkeypatch) as engine:
            with pytest.raises(InvalidRequest, match="disable_overlap_scheduler"):
                await answer(engine, processors=("counts",))
            edits = library.Edits(params(processors=("counts",)), (2,), len(PROMPT))
            wanted = request_for(tuple(PROMPT), max_tokens=4)
            result = library.submit(engine.llm, wanted, engine._facts, edits=edits)
            assert (await result).outputs[0].token_ids == [103, 103, 104, 105]
        async with embedded(tiny_model, monkeypatch, arguments={"disable_overlap_scheduler": True}) as engine:
            assert await answer(engine, processors=("counts",), max_tokens=4) == [103, 104, 105, 106]


async def test_one_model_speculation_is_greedy_unless_told_otherwise(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = {"temperature": 2.0, "max_tokens": 12}
    async with embedded(tiny_model, monkeypatch, arguments={"speculative_config": MTP}) as engine:
        with pytest.raises(InvalidRequest, match="allow_advanced_sampling"):
            await answer(engine, **hot)
        plain = await answer(engine)
        result = engine.llm.generate_async(PROMPT, sampling(temperature=2.0, ignore_eos=True, max_tokens=12))
        assert (await result).outputs[0].token_ids == plain
    advanced = {"speculative_config": MTP | {"allow_advanced_sampling": True}}
    async with embedded(tiny_model, monkeypatch, arguments=advanced) as engine:
        assert await answer(engine, **hot) != plain


async def test_penalties_of_the_engine_do_not_count_the_prompt(folder: Path, calls: list[Any]) -> None:
    """TensorRT-LLM's samplers would; ours and OpenAI's do not."""
    async with running(folder, sampler_type="TRTLLMSampler") as engine:
        await tokens(engine, request(presence_penalty=0.5))
        assert calls[-1][1]["sampling_params"].prompt_ignore_length == len(PROMPT)
        await tokens(engine, request(repetition_penalty=1.5))
        assert calls[-1][1]["sampling_params"].prompt_ignore_length is None


# Settings.


def arguments_of(*flags: str, folder: Path | None = None) -> dict[str, Any]:
    return effective(read_settings(["--engine", "trtllm", *flags]), folder).arguments


def test_processors_switch_the_overlap_scheduler_off_and_nothing_else_does() -> None:
    assert "disable_overlap_scheduler" not in arguments_of()
    for flags in (["--trtllm-sampling", "processors"], ["--enable-test-logits-processor", "true"]):
        assert arguments_of(*flags)["disable_overlap_scheduler"] is True
        override = json.dumps({"disable_overlap_scheduler": False})
        assert arguments_of(*flags, "--override-engine-args", override)["disable_overlap_scheduler"] is True
    config = engine_config(read_settings(["--engine", "trtllm", "--trtllm-sampling", "processors"]), Path("folder"))
    assert isinstance(config, TrtllmConfig) and config.sampling == "processors"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"speculative_config": NGRAM}, "speculative_config"),
        ({"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}, "capacity_scheduler_policy"),
    ],
)
def test_processors_with_arguments_that_skip_them_stop_the_start(override: dict[str, Any], named: str) -> None:
    flags = ["--override-engine-args", json.dumps(override)]
    arguments_of(*flags)
    with pytest.raises(EngineArgsError, match=rf"OVERRIDE_ENGINE_ARGS: .*{named}.*TRTLLM_SAMPLING=processors"):
        arguments_of(*flags, "--trtllm-sampling", "processors")


def test_a_sampler_that_does_not_check_drafts_stops_the_start() -> None:
    override = json.dumps({"sampler_type": "TRTLLMSampler", "speculative_config": NGRAM})
    with pytest.raises(EngineArgsError, match="sampler_type: TRTLLMSampler does not check drafts"):
        arguments_of("--override-engine-args", override)


def test_one_model_speculation_is_told_to_sample() -> None:
    def told(config: dict[str, Any]) -> Any:
        override = json.dumps({"speculative_config": config})
        return arguments_of("--override-engine-args", override)["speculative_config"].get("allow_advanced_sampling")

    assert told(MTP) is True and told(MTP | {"allow_advanced_sampling": False}) is False
    assert told(NGRAM) is None and told(MTP | {"mtp_eagle_one_model": False}) is None
    eagle = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": "draft"}
    assert told(eagle) is True and told(eagle | {"eagle3_one_model": False}) is None


TOKENIZERS: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({}, "", ("xgrammar", "llguidance")),
    ({"auto_map": {"AutoTokenizer": ["code.Slow", "code.Fast"]}}, "", ("xgrammar", "llguidance")),
    ({"auto_map": {"AutoTokenizer": ["code.Slow", None]}}, "tiktoken.model", ("xgrammar",)),
    ({"auto_map": {"AutoTokenizer": ["code.Slow", None]}}, "", ()),
]


@pytest.mark.parametrize(("config", "file", "expected"), TOKENIZERS)
def test_the_guided_backend_is_one_that_the_tokenizer_can_have(
    folder: Path, config: dict[str, Any], file: str, expected: tuple[str, ...]
) -> None:
    """The others would fail at the start, after minutes of loading."""
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if file:
        (folder / file).touch()
    assert guided_backends(folder) == expected
    chosen = arguments_of(folder=folder).get("guided_decoding_backend")
    assert chosen == (expected[0] if expected else None)
    for backend in ("xgrammar", "llguidance"):
        told = TrtllmConfig(model=str(folder), arguments={"guided_decoding_backend": backend})
        outcome = contextlib.nullcontext() if backend in expected else pytest.raises(EngineFailure, match="cannot load")
        with outcome:
            library.load(told).shutdown()


def test_the_guided_backend_can_be_chosen_or_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments_of()["guided_decoding_backend"] == "xgrammar"
    assert arguments_of("--guided-decoding-backend", "llguidance")["guided_decoding_backend"] == "llguidance"
    assert arguments_of("--guided-decoding-backend", "none")["guided_decoding_backend"] is None
    skip = ["--override-engine-args", json.dumps({"skip_tokenizer_init": True})]
    assert "guided_decoding_backend" not in arguments_of(*skip)
    with pytest.raises(EngineArgsError, match="guided decoding needs the tokenizer"):
        arguments_of(*skip, "--guided-decoding-backend", "xgrammar")
    assert main(["config", "--engine", "trtllm"]) == 0
    assert 'guided_decoding_backend: "xgrammar"  # default' in capsys.readouterr().out


async def test_structural_tags_pass_through_to_xgrammar(folder: Path, calls: list[Any]) -> None:
    tag = json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})
    async with running(folder) as engine:
        assert engine.info.guides == GUIDE_KINDS
        with pytest.raises((InvalidRequest, EngineFailure), match="structural tag"):  # the stand-in follows none
            await tokens(engine, request(guide=Guide("structural_tag", tag)))
    guides = [keywords["sampling_params"].guided_decoding for _, keywords in calls]
    assert [guide.structural_tag for guide in guides if guide is not None] == [tag]
    async with running(folder, guided_decoding_backend="llguidance") as engine:
        assert "structural_tag" not in engine.info.guides and len(engine.info.guides) == len(GUIDE_KINDS) - 1
    async with running(folder, guided_decoding_backend=None) as engine:
        assert engine.info.guides == ()
