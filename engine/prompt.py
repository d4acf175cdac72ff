"""What every engine with a model asks of a prompt before it takes it."""

from engine.errors import ContextOverflow, InvalidRequest
from engine.types import GenerateRequest


def output_here(request: GenerateRequest) -> int:
    """Most output tokens that are computed where the request goes: of a prefill's, one."""
    most = request.sampling.max_tokens
    return min(1, most) if request.prefill_only else most


def check_prompt(request: GenerateRequest, vocab_size: int, capacity: int) -> None:
    """`capacity`: most tokens, prompt and output together, that there is room for. Raises InvalidRequest, ContextOverflow included."""
    prompt, output = request.prompt_token_ids, output_here(request)
    if not prompt:
        raise InvalidRequest("the prompt is empty", "prompt")
    if len(prompt) + output > capacity:
        raise ContextOverflow(f"{len(prompt)} prompt tokens and {output} output tokens exceed the {capacity} that fit")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise InvalidRequest(f"prompt token ids must be from 0 to {vocab_size - 1}", "prompt")
