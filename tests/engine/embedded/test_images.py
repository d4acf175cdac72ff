"""Images in the embedded engine.

Each family generates what transformers generates from the pixels, token for token, however steps are cut.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.kv_events import KvEvent, Stored
from tests.support.handoff import OPTIONS as PAIR_OPTIONS
from tests.support.handoff import tokens as tokens_of
from tests.support.vision_models import BUILDERS
from tests.support.vision_prompts import Family, Prompt, answers, request_for, text

OPTIONS: dict[str, Any] = {
    **PAIR_OPTIONS,
    "kv_transfer": "",
    "attention": "sdpa",
    "kv_block_size": 8,
    "num_blocks": 200,
}


IN_FULL = "qwen2_vl"
"""The family that every schedule is tried on; the others are tried on one that mixes them."""


def of_family(kind: str, *values: Any, name: str = "") -> Any:
    """Parameters of a test. `make test` runs two families, one of them with grids and positions of its own."""
    marks = () if kind in (IN_FULL, "smolvlm") else pytest.mark.slow
    return pytest.param(kind, *values, id=name or kind, marks=marks)


@pytest.fixture(scope="module", params=map(of_family, BUILDERS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(BUILDERS[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def prompts(family: Family) -> list[Prompt]:
    """One image, several, the same twice, two with the same text, none; one begins and one ends with an image."""
    shared = text(21, 0)
    return [
        family.prompt(shared, 0, text(5, 1)),
        family.prompt(shared, 1, text(5, 1)),
        family.prompt(2, text(9, 2), 3, text(1, 3), 0),
        family.prompt(text(3, 4), 1, [70], 1, text(40, 5)),
        family.prompt(shared, text(30, 6)),
    ]


@pytest.fixture(scope="module")
def expected(family: Family, prompts: list[Prompt]) -> list[list[int]]:
    return [family.generate(prompt) for prompt in prompts]


def core_of(family: Family, **options: Any) -> EngineCore:
    return EngineCore(EmbeddedConfig(model=str(family.folder), **{**OPTIONS, **options}), lambda _: None)


def said(core: EngineCore, prompts: list[Prompt], prefix: str = "", **sampling: Any) -> list[list[int]]:
    deltas = answers(
        core, [request_for(f"{prefix}{index}", prompt, **sampling) for index, prompt in enumerate(prompts)]
    )
    return [tokens_of(deltas[f"{prefix}{index}"]) for index in range(len(prompts))]


MIXED: dict[str, Any] = {"overlap_scheduler": "on", "max_batch_size": 2, "max_num_tokens": 7}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(of_family(kind, MIXED, name=f"{kind}-mixed") for kind in BUILDERS),
        pytest.param(IN_FULL, {}, id=f"{IN_FULL}-plain"),
        pytest.param(IN_FULL, {"max_num_tokens": 7, "enable_block_reuse": False}, id=f"{IN_FULL}-no reuse"),
        pytest.param(IN_FULL, {"max_num_tokens": 60, "enable_chunked_prefill": False}, id=f"{IN_FULL}-unchunked"),
    ],
    indirect=["family"],
    scope="module",
)
def test_greedy_equals_generate_however_it_is_scheduled(
    family: Family, prompts: list[Prompt], expected: list[list[int]], options: dict[str, Any]
) -> None:
    core = core_of(family, **options)
    assert said(core, prompts) == expected
    assert core.stats().kv_cache_stats.used_num_blocks == 0


@pytest.mark.parametrize(
    ("family", "reuse", "overlap"),
    [
        *(of_family(kind, True, "on") for kind in BUILDERS),
        (IN_FULL, True, "off"),
        (IN_FULL, False, "on"),
        (IN_FULL, False, "off"),
    ],
    indirect=["family"],
    scope="module",
)
def test_preempted_sequences_with_images_are_computed_again(
    family: Family, prompts: list[Prompt], reuse: bool, overlap: str
) -> None:
    """There is room for both prompts, and not for what follows."""
    pair = prompts[:2]
    blocks = sum(-(-len(prompt.tokens) // 2) for prompt in pair) + 4
    core = core_of(
        family,
        kv_block_size=2,
        num_blocks=blocks,
        max_num_tokens=30,
        enable_block_reuse=reuse,
        overlap_scheduler=overlap,
    )
    assert said(core, pair, max_tokens=36) == [family.generate(prompt, 36) for prompt in pair]
    assert core.scheduler.preemptions > 0


def test_answers_depend_on_the_images(expected: list[list[int]]) -> None:
    assert expected[0] != expected[1]


def test_blocks_are_reused_for_the_same_image_and_for_no_other(
    family: Family, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    core = core_of(family)
    before = prompts[0].images[0].start
    cached = []
    for index in (0, 1, 0, 1):
        deltas = answers(core, [request_for("a", prompts[index])])["a"]
        assert tokens_of(deltas) == expected[index]
        assert deltas[0].prompt is not None
        cached.append(deltas[0].prompt.cached_tokens)
    assert cached[:2] == [0, before // 8 * 8]
    assert cached[2:] == [(len(prompts[index].tokens) - 1) // 8 * 8 for index in (0, 1)]


def test_logprobs_are_those_of_the_model(family: Family, prompts: list[Prompt]) -> None:
    prompt = prompts[2]
    core = core_of(family, max_num_tokens=11)
    deltas = answers(core, [request_for("a", prompt, max_tokens=3, logprobs=2, prompt_logprobs=0)])["a"]
    output = tokens_of(deltas)
    rows = family.logprobs(prompt, output)
    assert deltas[0].prompt is not None and deltas[0].prompt.logprobs is not None
    entries = [*deltas[0].prompt.logprobs[1:], *(entry for delta in deltas for entry in delta.logprobs)]
    full = [*prompt.tokens, *output]
    assert len(entries) == len(full) - 1
    for position, entry in enumerate(entries):
        assert entry is not None
        assert entry[0].logprob == pytest.approx(rows[position, full[position + 1]].item(), abs=2e-4)
    assert [item.logprob for item in entries[-1][1:]] == pytest.approx(rows[-2].topk(2).values.tolist(), abs=2e-4)  # type: ignore[index]


def test_choices_of_one_prompt_share_its_blocks(
    family: Family, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    core = core_of(family)
    requests = [request_for(str(seed), prompts[2], seed=seed, temperature=0.9 * (seed > 0)) for seed in range(3)]
    deltas = answers(core, requests)
    assert tokens_of(deltas["0"]) == expected[2]
    assert core.blocks.reused >= 2 * ((len(prompts[2].tokens) - 1) // 8)
    alone = answers(core_of(family, enable_block_reuse=False), requests[1:])
    assert [tokens_of(deltas[name]) for name in "12"] == [tokens_of(alone[name]) for name in "12"]


def test_without_images_it_is_the_text_model(family: Family) -> None:
    """Its image token is then a token like others."""
    prompts = [family.prompt(text(30, 8)), family.prompt([*text(4, 9), family.token, family.token])]
    embeddings: list[torch.Tensor] = []
    with torch.inference_mode():
        for prompt in prompts:
            embeddings.append(family.module(input_ids=torch.tensor([prompt.tokens])).logits[0, -1].argmax())
    assert [output[0] for output in said(core_of(family), prompts, max_tokens=1)] == [
        int(token) for token in embeddings
    ]


def test_the_tower_is_not_kept(family: Family) -> None:
    model: Any = core_of(family).runner
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    assert parameters <= sum(
        parameter.numel() for name, parameter in family.module.named_parameters() if "vision" not in name
    )


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    yield Family(BUILDERS["llava"](tmp_path_factory.mktemp("model")))


def test_events_name_the_images_of_blocks(llava: Family) -> None:
    events: list[KvEvent] = []
    core = EngineCore(EmbeddedConfig(model=str(llava.folder), **OPTIONS), events.append)
    first, second = llava.shown(0).key, llava.shown(1).key
    prompt = llava.prompt(text(5, 0), 0, text(2, 1), 1, text(20, 2))  # spans 5..20 and 23..38
    answers(core, [request_for("a", prompt, max_tokens=1)])
    blocks = [block for event in events if isinstance(event.data, Stored) for block in event.data.blocks]
    assert [[(key["type"], key["hash"], key["start_offset"]) for key in block.mm_keys] for block in blocks] == [
        [("mm_key", first, 0)],
        [("mm_key", first, 3)],
        [("mm_key", first, 11), ("mm_key", second, 0)],
        [("mm_key", second, 1)],
        [("mm_key", second, 9)],
        [],
        [],
    ]
    assert [token.token_id for block in blocks for token in block.tokens] == list(prompt.tokens[:56])
