"""The body of a response as the neutral request."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from multimodal.answers.responses import Asked
from multimodal.errors import RequestError, shown
from multimodal.request import Ask, AskedGuide, Conversation, SamplingDefaults, TextGrammar, Tool, Tools
from protocol.chat import FunctionDefinition
from protocol.responses import (
    ContextFields,
    InputItem,
    MemberTool,
    ResponseCreate,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
)
from routers.fields import effort_of, sampling_of
from routers.responses.history import InputEntry, Messages, known_name
from routers.tools import chosen_tools, template_tools

_FIELDS = {
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_budget": "thinking_token_budget",
}

_TYPES = ("function", "custom", "namespace")
_MAX_NAME = 128

log = logging.getLogger(__name__)


def convert(body: ResponsesRequest, history: Sequence[InputItem] = ()) -> Ask:
    """Return the request of a body, which continues `history`. Raises RequestError."""
    ask = context(body, history)
    own: dict[str, Any] = sampling_of(body)
    if body.max_output_tokens is not None:
        own["max_tokens"] = body.max_output_tokens
    if not generates(body):
        own["max_tokens"] = 1
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        own["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None and body.top_logprobs < 0:
        raise RequestError("'top_logprobs' must be at least 0.", "top_logprobs")
    return Ask(
        prompt=ask.prompt,
        tools=ask.tools,
        fields=_FIELDS | {"guide": "text.format"},
        guides=tuple(_guides(body)),
        reasoning_budget=body.thinking_token_budget,
        **own,
    )


def generates(body: ResponsesRequest) -> bool:
    """Return whether a response has output."""
    return not (isinstance(body, ResponseCreate) and body.generate is False)


def context(body: ContextFields, history: Sequence[InputItem] = ()) -> Ask:
    """Return a request that has the conversation and tools of a body, and nothing else. Raises RequestError."""
    if body.input is None and not history and body.instructions is None:
        raise RequestError("'input' is missing.", "input")
    messages = Messages()
    if body.instructions is not None:
        messages.add([InputEntry("instructions", InputItem(type="message", role="system", content=body.instructions))])
    messages.add(InputEntry("previous_response_id", item) for item in history)
    messages.add(InputEntry(f"input.{place}", item) for place, item in enumerate(items_of(body.input)))
    if isinstance(body.input, list) and not messages.messages:
        raise RequestError("'input' is empty.", "input")
    tools, shown_tools = tools_of(body)
    return Ask(
        prompt=Conversation(
            messages=messages.messages,
            media=messages.media,
            tools=shown_tools,
            template_kwargs=body.chat_template_kwargs or {},
            variables=effort_of(body.reasoning.effort if body.reasoning is not None else None),
        ),
        tools=tools,
        fields=_FIELDS,
    )


def items_of(given: str | list[InputItem] | None) -> list[InputItem]:
    """Return the input of a body as items."""
    if isinstance(given, str):
        return [InputItem(type="message", role="user", content=given)]
    return given or []


def asked_of(body: ResponsesRequest, ask: Ask, unique: str, defaults: SamplingDefaults) -> Asked:
    """Return the fields of the response that repeat the request."""
    tools = [(space, tool) for _, space, tool in _flat(body.tools or ()) if tool.type in ("function", "custom")]
    text, reasoning = body.text, body.reasoning
    summary = reasoning.summary or reasoning.generate_summary if reasoning is not None else None
    conversation = conversation_of(body)
    return Asked(
        unique=unique,
        custom=frozenset(known_name(space, tool.name or "") for space, tool in tools if tool.type == "custom"),
        namespaces={known_name(space, tool.name or ""): (space, tool.name or "") for space, tool in tools if space},
        seal="reasoning.encrypted_content" in (body.include or ()),
        generate=generates(body),
        fields={
            "background": bool(body.background),
            "conversation": {"id": conversation} if conversation is not None else None,
            "frequency_penalty": ask.frequency_penalty,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": ask.presence_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": summary},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": defaults.of(ask, "temperature"),
            "text": {
                "format": _shown_format(text.format)
                if text is not None and text.format is not None
                else {"type": "text"},
                **({"verbosity": text.verbosity} if text is not None and text.verbosity is not None else {}),
            },
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown_tool(tool) for tool in body.tools or () if tool.type in _TYPES],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": defaults.of(ask, "top_p"),
            "truncation": body.truncation or "disabled",
            "user": body.user,
        },
    )


def conversation_of(body: ContextFields) -> str | None:
    """Return the id of the conversation that a body continues."""
    return body.conversation if isinstance(body.conversation, str | None) else body.conversation.id


def tools_of(body: ContextFields) -> tuple[Tools | None, list[dict[str, Any]]]:
    """Return the tools that the model may call, and those that the prompt shows. Raises RequestError."""
    functions: list[FunctionDefinition] = []
    offered: dict[str, Tool] = {}
    schemas: list[str] = []
    for param, namespace, tool in _flat(body.tools or ()):
        if tool.type not in ("function", "custom"):
            _warn(shown(tool.type))
            continue
        if tool.name is None:
            raise RequestError(f"'{param}.name' is missing.", f"{param}.name")
        name = known_name(namespace, tool.name)
        if name in offered:
            raise RequestError(f"'{param}.name' is the name of another tool, too.", f"{param}.name")
        if len(name) > _MAX_NAME:
            raise RequestError(
                f"'{param}.name' and its namespace have more than {_MAX_NAME} characters.", f"{param}.name"
            )
        text = _grammar(tool, param) if tool.type == "custom" else None
        function = _custom(tool, name, text) if tool.type == "custom" else _function(tool, name)
        functions.append(function)
        offered[name] = Tool(name, function.parameters or {}, bool(function.strict), text)
        schemas.append(f"{param}.parameters")
    choice = body.tool_choice
    if not offered and choice not in (None, "none", "auto"):
        raise RequestError("'tool_choice' needs 'tools': functions or custom tools.", "tool_choice")
    if not offered or choice == "none":
        return None, []
    mode, allowed = _choice(choice)
    parallel = body.parallel_tool_calls is not False
    tools = chosen_tools(offered, mode, allowed, parallel=parallel, field="tool_choice", param="tools", schemas=schemas)
    return tools, template_tools(functions)


@lru_cache(100)
def _warn(kind: str) -> None:
    log.warning(
        "ignoring tools of type %r, of which only functions, custom tools and namespaces are supported; logged once",
        kind,
    )


def _flat(tools: Iterable[ResponsesTool]) -> Iterator[tuple[str, str | None, MemberTool]]:
    """Yield the field of each tool, its namespace, and the tool. Raises RequestError."""
    for place, tool in enumerate(tools):
        if tool.type != "namespace":
            yield f"tools.{place}", None, tool
            continue
        if tool.name is None:
            raise RequestError(f"'tools.{place}.name' is missing.", f"tools.{place}.name")
        for inner, part in enumerate(tool.tools or ()):
            yield f"tools.{place}.tools.{inner}", tool.name, part


def _function(tool: MemberTool, name: str) -> FunctionDefinition:
    fields: dict[str, Any] = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    given = {field: value for field, value in fields.items() if value is not None}
    return FunctionDefinition(name=name, **given)


def _grammar(tool: MemberTool, param: str) -> TextGrammar | None:
    """Return the grammar of a custom tool, if it has one. Raises RequestError."""
    form = tool.format
    if form is None or form.type == "text":
        return None
    if form.type != "grammar":
        raise RequestError(f"'{param}.format.type' must be text or grammar.", f"{param}.format.type")
    if form.syntax not in ("regex", "lark"):
        raise RequestError(f"'{param}.format.syntax' must be regex or lark.", f"{param}.format.syntax")
    if not form.definition:
        raise RequestError(f"'{param}.format.definition' is missing.", f"{param}.format.definition")
    return TextGrammar("regex" if form.syntax == "regex" else "lark", form.definition, f"{param}.format")


def _custom(tool: MemberTool, name: str, grammar: TextGrammar | None) -> FunctionDefinition:
    """Return a custom tool as a function with one text argument. The model sees its grammar: a regular expression in
    the schema, Lark in the description, since a schema cannot contain it.
    """
    text: dict[str, Any] = {"type": "string", "description": "The whole input of the tool, as plain text."}
    description = tool.description or ""
    if grammar is not None and grammar.syntax == "regex":
        text["pattern"] = grammar.definition
    elif grammar is not None:
        description = f"{description}\n\nThe input must match this grammar (Lark):\n{grammar.definition}".strip()
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return FunctionDefinition(name=name, description=description, parameters=schema, strict=grammar is not None)


def _choice(choice: Any) -> tuple[str, Sequence[str] | None]:
    """Return how the model chooses (auto, required or one function), and among which tools; None for all."""
    if choice in (None, "auto", "required"):
        return choice or "auto", None
    if isinstance(choice, Mapping):
        if choice.get("type") in ("function", "custom"):
            return "function", [_name(choice, "tool_choice")]
        if choice.get("type") == "allowed_tools":
            if (mode := choice.get("mode", "auto")) not in ("auto", "required"):
                raise RequestError("'tool_choice.mode' must be auto or required.", "tool_choice.mode")
            listed = choice.get("tools")
            tools = enumerate(listed if isinstance(listed, list) else ())
            names = [_name(tool, f"tool_choice.tools.{place}") for place, tool in tools if not _hosted(tool)]
            if not names:
                raise RequestError(
                    "'tool_choice.tools' must name at least one function or custom tool.", "tool_choice.tools"
                )
            return mode, names
    raise RequestError(
        "'tool_choice' must be none, auto, required, a function, a custom tool or allowed_tools.", "tool_choice"
    )


def _hosted(tool: Any) -> bool:
    """Tell whether OpenAI runs a tool, which is ignored with a warning."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(kind, str) or kind in _TYPES:
        return False
    _warn(shown(kind))
    return True


def _name(tool: Any, param: str) -> str:
    name = tool.get("name") if isinstance(tool, Mapping) and tool.get("type") in ("function", "custom") else None
    if not isinstance(name, str):
        raise RequestError(f"'{param}.name' must name a function or a custom tool.", f"{param}.name")
    return known_name(tool.get("namespace"), name)


def _guides(body: ResponsesRequest) -> list[AskedGuide]:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [AskedGuide("text.format", "json_object", None)]
    if form.type != "json_schema":
        raise RequestError("'text.format.type' must be text, json_object or json_schema.", "text.format.type")
    if form.schema_ is None:
        raise RequestError("'text.format.schema' is missing.", "text.format.schema")
    return [AskedGuide("text.format", "json_schema", form.schema_)]


def _shown_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {
        "type": "json_schema",
        "name": form.name or "schema",
        "description": form.description,
        "schema": form.schema_,
        "strict": form.strict is not False,
    }


def _shown_tool(tool: MemberTool) -> dict[str, Any]:
    if tool.type == "custom":
        return tool.model_dump(exclude_unset=True)
    if isinstance(tool, ResponsesTool) and tool.type == "namespace":
        inner = [_shown_tool(part) for part in tool.tools or () if part.type in _TYPES]
        return {"type": "namespace", "name": tool.name, "description": tool.description or "", "tools": inner}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
