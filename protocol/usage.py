"""Token counts, as OpenAI reports them."""

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """`image_tokens` is there if the prompt has images: the part of its tokens that stand for them."""

    cached_tokens: int
    image_tokens: int | None = None


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    """`prompt_tokens` counts each prompt once, whatever n; `completion_tokens` is over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
