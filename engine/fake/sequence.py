"""One request in the fake engine: what it echoes, when it ends, and its handoff."""

import time
from dataclasses import dataclass, field
from hashlib import blake2b

from msgspec.structs import replace

from engine.base import DeltaStream
from engine.config import FakeConfig
from engine.errors import EngineUnavailable, InvalidRequest
from engine.fake.blocks import FakeSequenceBlocks
from engine.kit.reasoning import ReasoningProgress
from engine.media import Unexpanded
from engine.types import FinishReason, GenerateRequest

BACKEND = "fake"


@dataclass(eq=False, slots=True)
class FakeSequence:
    """A request, its tokens so far and its next ones."""

    request: GenerateRequest
    received: float
    tokens: list[int]
    """Prompt and output."""
    echo: tuple[int, ...]
    stops: frozenset[int]
    """All ids that end this sequence."""
    num_blocks: int
    """Maximum number of blocks it can need."""
    stream: DeltaStream = field(init=False)
    blocks: FakeSequenceBlocks | None = None
    cursor: int = 0
    started: bool = False
    """Whether its prompt has been computed."""
    reasoning: ReasoningProgress | None = None
    echoed: ReasoningProgress | None = None
    """The echo's progress as if reasoning had no budget. `reasoning` has what is left of that; both are None without
    one."""

    def next_token(self) -> int:
        """Return the next id: the echo's, or that which ends reasoning whose budget is spent."""
        if self.reasoning is None or self.echoed is None:
            return self._echoed()
        token = self.reasoning.forced
        if token is not None:
            self._leave_out()
        if token is None:
            token = self._echoed()
            self.echoed.accept(token)
        self.reasoning.accept(token)
        return token

    def _leave_out(self) -> None:
        """Leave the rest of the reasoning, if it ends, out of the echo."""
        assert self.echoed is not None
        for _ in self.echo:
            if not self.echoed.inside or self.echo[self.cursor % len(self.echo)] in self.stops:
                break
            self.echoed.accept(self._echoed())

    def _echoed(self) -> int:
        """Return the next id of the echo; before `min_tokens`, the next one that does not end the sequence."""
        output = len(self.tokens) - len(self.request.prompt_token_ids)
        for _ in self.echo:
            token = self.echo[self.cursor % len(self.echo)]
            self.cursor += 1
            if output >= self.request.sampling.min_tokens or token not in self.stops:
                return token
        return next(token for token in range(len(self.stops) + 1) if token not in self.stops)

    def finish(self, token: int) -> tuple[FinishReason | None, int | None]:
        """Return finish reason and stop reason after the newest token."""
        sampling = self.request.sampling
        if token in self.stops:
            return "stop", token if token in sampling.stop_token_ids else None
        if len(self.tokens) - len(self.request.prompt_token_ids) >= sampling.max_tokens:
            return "length", None
        return None, None


def sequence_of(request: GenerateRequest, config: FakeConfig, number: int, num_blocks: int) -> FakeSequence:
    """Return the sequence of the request `number`, which has passed the checks."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    stops = frozenset(sampling.stop_token_ids)
    eos = frozenset() if sampling.ignore_eos else frozenset(config.eos_token_ids)
    answer = config.script[number % len(config.script)] if config.script else ()
    full = (*_digits_of_images(request, config.vocab_size), *prompt)
    sequence = FakeSequence(
        request=request,
        received=time.monotonic(),
        tokens=list(prompt),
        echo=(*answer, *config.eos_token_ids[:1])
        if config.script
        else tuple(token for token in full if token not in eos or token in stops) or full,
        stops=stops | eos,
        num_blocks=num_blocks,
    )
    if (budget := sampling.reasoning_budget) is not None:
        sequence.reasoning = ReasoningProgress(budget)
        sequence.echoed = ReasoningProgress(replace(budget, tokens=sampling.max_tokens))
    if request.handoff is not None:
        for token in request.handoff.first.token_ids:
            sequence.next_token()
            sequence.tokens.append(token)
    return sequence


def state_of(request: GenerateRequest, first: tuple[int, ...]) -> bytes:
    """Return the state of a handoff after the first token."""
    images = [(image.key, image.start, image.length) for image in request.spans]
    return blake2b(repr((request.prompt_token_ids, images, first)).encode(), digest_size=16).digest()


def check_media(request: GenerateRequest) -> None:
    """Check the media of a prompt that has passed `check_prompt`.

    Raises InvalidRequest for media that are not encoded, and EngineUnavailable for embeddings that are lost.
    """
    if isinstance(request.media, Unexpanded):
        raise InvalidRequest("the fake engine takes images as embeddings alone", "prompt")
    reads = request.handoff is not None and request.handoff.state
    if not reads and not all(image.data for image in request.spans):
        raise EngineUnavailable("the images' embeddings are not here, so that the prompt cannot be computed")


def check_handoff(request: GenerateRequest) -> None:
    """Check a handoff. Raises InvalidRequest for one from another kind of engine or of another prompt."""
    handoff = request.handoff
    if handoff is None:
        return
    if handoff.backend != BACKEND:
        raise InvalidRequest(f"the handoff is of the {handoff.backend} engine; this replica runs {BACKEND}", "handoff")
    if handoff.state and handoff.state != state_of(request, handoff.first.token_ids):
        raise InvalidRequest("the handoff is of another prompt", "handoff")


def _digits_of_images(request: GenerateRequest, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that stand for the images: digits, in the byte tokenizer's vocabulary."""
    return tuple((ord(digit) + 3) % vocab_size for image in request.spans for digit in image.key[:8])
