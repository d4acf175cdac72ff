"""Chat templates: messages to prompt text, as transformers' `apply_chat_template` renders them."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multimodal.errors import RequestError


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it renders as its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled template. Rendering is sandboxed: a template can neither reach Python nor change its inputs."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form), **special_tokens)
        self._template = environment.from_string(source)

    def render(self, messages: Sequence[dict[str, Any]], *, continue_final_message: bool = False, **variables: Any) -> str:
        """The prompt. With `continue_final_message` it ends where the last message's text ends, so that the model goes on with it."""
        try:
            text = self._template.render(messages=messages, **variables)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RequestError(f"The chat template refuses these messages: {error}", "messages") from error
        if not continue_final_message:
            return text
        final = str(messages[-1]["content"]).strip()
        at = text.rfind(final)
        if not final or at < 0:
            raise RequestError("The last message has no text to continue.", "continue_final_message")
        return text[: at + len(final)]


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML; prompts must not be escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
