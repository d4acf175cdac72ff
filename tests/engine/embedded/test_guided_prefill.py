"""A prompt is computed while its grammar is compiled, if that takes long; the first token waits for both."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.base import DeltaStream
from engine.config import EmbeddedConfig
from engine.embedded import engine as module
from engine.embedded.core import EngineCore
from engine.embedded.engine import EmbeddedEngine
from engine.embedded.grammar.compiler import Matcher
from engine.embedded.grammar.library import Bitmask
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.types import Delta, GenerateRequest, Guide, SamplingParams

EOS = 2
PROMPT = tuple(range(3, 99))
"""Three blocks of 32 tokens."""


class Digits:
    """The grammar of any number of tokens 7 and 9, as a `Compiled` and as its own `Position`."""

    num_bytes = 0
    error = ""
    together = None

    def start(self) -> "Digits":
        return self

    def fill(self, bitmask: Bitmask, row: int) -> None:
        bitmask[row] = 0
        bitmask[row, 0] = 1 << 7 | 1 << 9

    def allows(self, token_id: int) -> bool:
        return token_id in (7, 9)

    def accept(self, token_id: int) -> bool:
        return token_id in (7, 9)

    def may_end(self) -> bool:
        return False


@pytest.fixture(params=["off", "on"])
def core(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[EngineCore]:
    config = EmbeddedConfig(
        model=str(tiny_model), dtype="float32", device="cpu", num_blocks=64, max_batch_size=4,
        overlap_scheduler=request.param,
    )  # fmt: skip
    core = EngineCore(config, lambda _: None)
    with torch.inference_mode():
        yield core
    core.close()


def sequence(name: str, *, guided: bool, prompt: tuple[int, ...] = PROMPT, arrival: float = 0.0) -> Sequence:
    sampling = SamplingParams(max_tokens=5, temperature=0, guide=Guide("regex", "[79]*") if guided else None)
    matcher = Matcher((EOS,)) if guided else None
    return Sequence(
        request=GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling),
        sampler=SamplerState(sampling, prompt, (EOS,), 0, matcher, 384, torch.device("cpu")),
        rank=arrival,
        arrival=arrival,
        tokens=list(prompt),
        lacks_grammar=guided,
    )


def run(core: EngineCore) -> dict[str, list[int]]:
    """Step until nothing gets anywhere; return the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    while core.ready:
        for name, output in core.step():
            assert isinstance(output, Delta)
            tokens.setdefault(name, []).extend(output.token_ids)
    return tokens


def test_all_but_the_last_token_is_computed_before_the_grammar_is_there(core: EngineCore) -> None:
    guided = sequence("guided", guided=True)
    core.add(guided)
    assert run(core) == {}
    assert guided.computed == len(PROMPT) - 1
    core.begin("guided", Digits())
    output = run(core)["guided"]
    assert len(output) == 5 and set(output) <= {7, 9}
    core.scheduler.audit()


def test_a_sequence_without_its_grammar_holds_up_no_other(core: EngineCore) -> None:
    """Not even one that shares its prompt, whose last block only the waiting one could complete."""
    core.add(sequence("guided", guided=True))
    core.add(sequence("free", guided=False, prompt=(*PROMPT, 5), arrival=1.0))
    core.add(sequence("same", guided=False, arrival=2.0))
    assert {name: len(tokens) for name, tokens in run(core).items()} == {"free": 5, "same": 5}
    core.abort("guided")
    assert run(core) == {}
    core.scheduler.audit()


def test_sequences_without_grammars_take_half_of_the_slots(core: EngineCore) -> None:
    waiting = [sequence(str(index), guided=True, prompt=(3, 4, index)) for index in range(6)]
    for each in waiting:
        core.add(each)
    assert run(core) == {}
    assert [each.computed for each in waiting] == [2, 2, 0, 0, 0, 0]
    core.add(sequence("free", guided=False, arrival=9.0))
    assert run(core).keys() == {"free"}
    for each in waiting:
        core.begin(each.request.request_id, Digits())
    assert {name: len(tokens) for name, tokens in run(core).items()} == {str(index): 5 for index in range(6)}


def test_a_grammar_for_a_request_that_has_left_is_ignored(core: EngineCore) -> None:
    core.add(sequence("guided", guided=True))
    run(core)
    core.abort("guided")
    core.begin("guided", Digits())
    assert run(core) == {}


class HeldCompiler:
    """A compiler that is done when `released` is set."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    def matcher(self, _: Guide) -> Matcher:
        return Matcher((EOS,))

    async def compile(self, _: Guide) -> Digits:
        await self.released.wait()
        return Digits()


@pytest.mark.parametrize("quick", [True, False])
async def test_a_prompt_waits_for_a_quick_guide_only(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last token that is computed on its own costs a step."""
    monkeypatch.setattr(module, "_HEAD_START_SECONDS", 3600.0 if quick else 0.0)
    engine, compiler, submitted = EmbeddedEngine(EmbeddedConfig(model="")), HeldCompiler(), asyncio.Queue[bool]()
    monkeypatch.setattr(engine, "_compiler", compiler, raising=False)
    monkeypatch.setattr(engine, "_submit", lambda _, matcher: submitted.put_nowait(matcher.ready))
    guide, stream = Guide("regex", "[79]*"), DeltaStream(lambda: None)
    request = GenerateRequest(
        request_id="a", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=5, guide=guide)
    )
    engine._submit_guided(request, guide, stream)
    if quick:
        compiler.released.set()
    assert await submitted.get() is quick
    compiler.released.set()
    await asyncio.gather(*engine._preparing)
    assert submitted.empty()
    assert engine._commands.empty() is quick
