"""What can go wrong between the wire and the engine.

RequestError                 the request is wrong: the user's mistake
├── ModelNotFound            it names a model that is not served
└── ContextLengthExceeded    prompt and output exceed the context
DeadlineExceeded             the request took longer than it may
"""

MAX_MESSAGE = 300


class RequestError(Exception):
    """`param` names the field at fault, `code` is for programs. Messages are bounded and never echo input at length."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…")
        self.param = param
        self.code = code


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    def __init__(self, served: str) -> None:
        super().__init__(f"The model does not exist; this server serves {served!r}.", "model", "model_not_found")


class ContextLengthExceeded(RequestError):
    """The prompt, or the prompt and the tokens asked for, exceed the context length."""

    def __init__(self, prompt: int, output: int, context: int, param: str) -> None:
        message = (
            f"This model's context is {context} tokens; the request has {prompt} prompt tokens and asks for {output} more, "
            f"{prompt + output} in all."
        )
        super().__init__(message, param, "context_length_exceeded")


class DeadlineExceeded(Exception):
    """The whole request took longer than the server allows."""
