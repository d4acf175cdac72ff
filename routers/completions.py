"""POST /v1/completions."""

from multimodal.answers.shapes import CompletionShape
from multimodal.errors import RequestError
from multimodal.request import Ask
from protocol.completions import Completion, CompletionRequest
from routers.endpoint import Endpoint
from routers.fields import to_ask

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


def convert(body: CompletionRequest) -> Ask:
    """Return the request of a body. Raises RequestError."""
    return to_ask(
        body,
        _prompts(body.prompt),
        {},
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        add_special_tokens=body.add_special_tokens is not False,
        echo=bool(body.echo),
        logprobs=body.logprobs,
    )


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return one prompt or several as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("'prompt' is empty.", "prompt")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [part for part in prompt if isinstance(part, (str, list))]


ENDPOINT = Endpoint(
    path="/v1/completions",
    name="completions",
    summary="Create a completion",
    description=(
        "Continue one prompt or several. "
        "With `stream` the answer is a stream of server-sent events, closed by `data: [DONE]`."
    ),
    body=CompletionRequest,
    chunk="CompletionChunk",
    answer=Completion,
    convert=convert,
    shape=CompletionShape,
)
