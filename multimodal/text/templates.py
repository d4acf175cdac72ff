"""Chat templates: messages to prompt text, as transformers' `apply_chat_template` renders them."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial, reduce
from itertools import takewhile
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multimodal.errors import RequestError, shown
from multimodal.request import Conversation
from multimodal.text.control import ControlTokens, unmarked

log = logging.getLogger(__name__)

MAX_CHARACTERS = 1 << 24
"""Length of the longest prompt that a template may make."""

_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
_PROBE = "probe of the content format"
_SYSTEM = ("system", "developer")
_FAILURES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that a template raises for messages that it does not expect."""
_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Tools as Hermes' and Qwen's templates write them, for a template that has no place for them."""


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it renders as its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled template. Rendering is sandboxed: a template can neither reach Python nor change its inputs.

    Raises ValueError if `source` is not a template. `special_tokens` are variables by name, such as `bos_token`. With
    `control`, the prompts have marks around the control tokens that the template wrote.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], control: ControlTokens | None = None) -> None:
        self.source = source
        self.control = control
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        if control is not None:
            special_tokens = {name: control.mark(text) for name, text in special_tokens.items()}
        environment.globals.update(
            raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form), **special_tokens
        )
        try:
            tree = environment.parse(source)
            if control is not None:
                _mark_literals(tree, control)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from error
        self._knows_developer = "developer" in source
        self.shows_tools = "tools" in meta.find_undeclared_variables(tree) or "tool_calls" in source
        """Whether it has a place for tools or their calls."""
        self.wants_parts = not self._shows(_PROBE) and self._shows(_parts(_PROBE))
        """Whether it reads contents as lists only."""
        system = "developer" if self._knows_developer else "system"
        untried = not self._shows_roles("user", "assistant", "user")  # say, it always needs tools
        self._shows_systems = untried or self._shows_roles("system", system, "user", "assistant", system, "user")
        """Whether it shows system messages behind the first message."""
        self._shows_users = untried or self._shows_roles("user", "user")
        """Whether it shows several messages of a user in a row."""
        if control is not None and (composed := self._composes(control)):
            control.trust(composed)
            log.warning(
                "the chat template composes %s in a way that this server cannot tell from a message's text: "
                "SPECIAL_TOKENS_IN_CONTENT does not hold for them",
                ", ".join(sorted(composed)),
            )

    def render(
        self, messages: Sequence[dict[str, Any]], *, continue_final_message: bool = False, **variables: Any
    ) -> str:
        """Return the prompt. With `continue_final_message` it ends where the last message's text ends, so that the
        model continues that text.

        A template without a place for `tools` gets them, their calls and results as texts. One that refuses or drops
        system messages behind the first message gets those at the beginning as one, and later ones as a user's. One
        that refuses several messages of a user in a row gets them as one.
        A message's content is a text or a list of parts. A template that reads only lists, as those of some vision
        models do, gets every text as a list. OpenAI's developer messages become system messages for a template that
        does not know them. Raises RequestError.
        """
        if not self._shows_systems:
            messages = _with_one_system_message(messages)
        if not self.shows_tools:
            messages = _with_tools(messages, variables.pop("tools", None) or ())
        if not self._shows_users:
            messages = _with_joined_users(messages)
        if self.wants_parts:
            messages = [message | {"content": _parts(message["content"])} for message in messages]
        if not self._knows_developer:
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        if not continue_final_message:
            return self._text(messages, variables)
        final, marked = _marked(messages[-1]["content"])
        text = self._text([*messages[:-1], messages[-1] | {"content": marked}], variables)
        at = text.rfind(_CONTINUE_HERE.strip())
        if at < 0 or final.strip() not in text[:at]:
            raise RequestError(
                "The chat template does not show the last message, so that it cannot be continued.",
                "continue_final_message",
            )
        return text[:at] if text.startswith(_CONTINUE_HERE, at) else text[:at].rstrip()

    def _composes(self, control: ControlTokens) -> set[str]:
        """Return control tokens that lack marks although no message contains them."""
        found: set[str] = set()
        for roles in (("system", "user", "assistant", "user"), ("user", "assistant"), ("user", "assistant", "tool")):
            messages = [{"role": role, "content": _PROBE} for role in roles]
            with suppress(RequestError):  # it refuses such a conversation
                found.update(control.forged(self.render(messages, add_generation_prompt=True)))
        return found

    def _shows(self, content: Any) -> bool:
        """Return whether a user's message with this content, made of `_PROBE`, is rendered as that text."""
        try:
            text = self._text([{"role": "user", "content": content}], {"add_generation_prompt": True})
        except RequestError:  # it refuses such content
            return False
        return _PROBE in text and "'text'" not in text  # not as Python spells a list

    def _shows_roles(self, *roles: str) -> bool:
        """Tell whether messages of these roles, in this order, all come out."""
        probes = [f"{_PROBE} {place}" for place in range(len(roles))]
        contents = map(_parts, probes) if self.wants_parts else probes
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            text = self._text(messages, {"add_generation_prompt": True})
        except RequestError:  # it refuses such a conversation
            return False
        return all(probe in text for probe in probes)

    def _text(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            pieces = self._template.generate(messages=messages, **{"tools": None, "documents": None, **variables})
            text = "".join(_bounded(pieces))
            text.encode()  # fails for half a surrogate pair, which JSON text inside the JSON can have
        except _FAILURES as error:
            raise RequestError(
                f"The chat template refuses these messages: {unmarked(str(error))}", "messages"
            ) from error
        return text if self.control is None else self.control.resolve(text)


def template_variables(chat: Conversation, allowed: Sequence[str]) -> dict[str, Any]:
    """Return the variables for the template. Raises RequestError for one that the server does not allow."""
    if unknown := next((name for name in chat.template_kwargs if name not in allowed), None):
        raise RequestError(
            f"{shown(unknown)!r} is not allowed in 'chat_template_kwargs'; the server's setting lists what is.",
            "chat_template_kwargs",
        )
    continues = chat.continue_final_message
    if continues and chat.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message"
        )
    prompts = not continues if chat.add_generation_prompt is None else chat.add_generation_prompt
    own: dict[str, Any] = {"add_generation_prompt": prompts, "continue_final_message": continues}
    return {**chat.variables, **chat.template_kwargs, **own, "tools": chat.tools or None}


def check_forged(chat: Conversation, forged: Sequence[str], name: str) -> None:
    """Raise RequestError if messages or tools have control tokens: `forged`. The request calls its messages `name`."""
    for token in forged[:1]:
        parts = {f"{name}.{place}": message for place, message in enumerate(chat.messages)}
        parts |= {f"tools.{place}": tool for place, tool in enumerate(chat.tools)}
        holds = (field for field, part in parts.items() if token in json.dumps(part, ensure_ascii=False))
        where = next(holds, name)  # several texts make it, or a variable of the template has it
        if not chat.as_sent:
            where = where.partition(".")[0]
        raise RequestError(f"{where!r} must not have {token!r}, which controls the model.", where, "special_token")


def _mark_literals(tree: nodes.Template, control: ControlTokens) -> None:
    """Mark the control tokens in a template's own text and strings, and those that it composes with a role."""
    for text in tree.find_all(nodes.TemplateData):
        text.data = control.mark(text.data)
    for literal in tree.find_all(nodes.Const):
        if isinstance(literal.value, str):
            literal.value = control.mark(literal.value)
    for joined in tree.find_all((nodes.Output, nodes.Add, nodes.Concat)):
        for part in joined.iter_child_nodes():
            if isinstance(part, nodes.TemplateData):
                part.data = control.mark_ends(part.data)
            elif isinstance(part, nodes.Const) and isinstance(part.value, str):
                part.value = control.mark_ends(part.value)


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _marked(content: str | list[dict[str, Any]]) -> tuple[str, str | list[dict[str, Any]]]:
    """Return the text at the end of a message's content, and the content with the mark after it."""
    if isinstance(content, str):
        return content, content + _CONTINUE_HERE
    if content[-1]["type"] != "text":
        raise RequestError("The last message ends with an image, which cannot be continued.", "continue_final_message")
    final: str = content[-1]["text"]
    return final, [*content[:-1], {"type": "text", "text": final + _CONTINUE_HERE}]


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise RequestError(
                f"The chat template makes more than {MAX_CHARACTERS} characters of these messages.", "messages"
            )
        yield piece


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, which Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _with_one_system_message(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return messages whose first system messages are one, and whose later ones are a user's."""
    first = list(takewhile(lambda message: message["role"] in _SYSTEM, messages))
    rest = [message | {"role": "user"} if message["role"] in _SYSTEM else message for message in messages[len(first) :]]
    if not first:
        return rest
    content = reduce(partial(_joined, between="\n\n"), (message["content"] for message in first))
    return [first[0] | {"content": content}, *rest]


def _with_joined_users(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return messages with those of a user in a row as one."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] == "user":
            found[-1] = found[-1] | {"content": _joined(found[-1]["content"], message["content"], "\n\n")}
        else:
            found.append(message)
    return found


def _with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return messages with the tools in the system message, calls in the assistant's text, results in a user's."""
    if not tools and not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return messages
    found = [_as_text(message) for message in messages]
    if tools:
        text = _INSTRUCTIONS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if found[0]["role"] in _SYSTEM:
            found[0] = found[0] | {"content": _joined(found[0]["content"], text)}
        else:
            found.insert(0, {"role": "system", "content": text})
    return found


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        result = _joined("<tool_response>", message["content"])
        return {"role": "user", "content": _joined(result, "</tool_response>")}
    calls = message.get("tool_calls") or ()
    for call in calls:
        function = {key: call["function"][key] for key in ("name", "arguments")}
        text = f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
        content = message["content"]
        message = message | {"content": _joined(content, text) if content else text}
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _joined(first: Any, second: Any, between: str = "\n") -> Any:
    """Join two contents, each a text or a list of parts; `between` separates texts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    (*before, last), (following, *after) = _parts(first), _parts(second)
    if last["type"] == following["type"] == "text":
        return [*before, *_parts(f"{last['text']}{between}{following['text']}"), *after]
    return [*before, last, following, *after]
