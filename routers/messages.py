"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request

from engine.types import GuideKind
from multimodal.answers.messages import MessageShape
from multimodal.errors import RequestError, shown
from multimodal.request import Ask, AskedGuide, Conversation, MediaRef, Tool, Tools
from protocol.messages import (
    BlockSource,
    ContentBlock,
    CountTokensRequest,
    InnerBlock,
    MessageParam,
    MessagesErrorEnvelope,
    MessagesRequest,
    MessageTool,
    PromptFields,
    TokensCount,
    WholeMessage,
)
from routers.body import converted, json_body, request_body, while_connected
from routers.endpoint import Endpoint, NamedEvents
from routers.state import ChatServiceDep, StateDep
from routers.tools import chosen_tools

T = TypeVar("T")

COUNT_PATH = "/v1/messages/count_tokens"
BODIES = (CountTokensRequest,)
_FIELDS = {"prompt": "messages", "stop": "stop_sequences", "reasoning_budget": "thinking.budget_tokens"}
_SAME = ("model", "stream", "temperature", "top_p", "top_k")
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)
"""The line that Claude Code writes before its system prompt; it differs from request to request."""
_TYPES = {
    "user": ("text", "image", "document", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text", "tool_addition", "tool_removal"),
}
"""Types of blocks in a message, by its role."""
_MODES = {"auto": "auto", "any": "required", "tool": "function"}
_INNER_TYPES = ("text", "image", "document", "tool_reference")
_MEDIA_TYPE = re.compile(r"image/[a-z0-9.+-]{1,32}")


class MessageEvents(NamedEvents):
    """Events as Anthropic's API sends them."""

    end = b""
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'


def convert(body: MessagesRequest) -> Ask:
    """Return the request of a body. Raises RequestError."""
    guides = tuple(_guides(body))
    thinking = body.thinking
    hidden = thinking is not None and (thinking.type == "disabled" or thinking.display == "omitted")
    tools, shown_tools = _tools(body)
    return Ask(
        prompt=_conversation(body, shown_tools),
        tools=tools,
        fields=_FIELDS | ({"guide": guides[0].field} if guides else {}),
        default_max_tokens=body.max_tokens,
        stop=body.stop_sequences or (),
        guides=guides,
        include_reasoning=not hidden,
        reasoning_budget=thinking.budget_tokens if thinking is not None else None,
        needs_budget=False,
        **{name: value for name in _SAME if (value := getattr(body, name)) is not None},
    )


def prompt_of(body: CountTokensRequest) -> Ask:
    """Return the request whose prompt is to be counted. Raises RequestError."""
    return Ask(prompt=_conversation(body, _tools(body)[1]), fields=_FIELDS)


def _guides(body: PromptFields) -> Sequence[AskedGuide]:
    form = body.output_config.format if body.output_config is not None else None
    if form is None:
        return ()
    kind: GuideKind = "json_schema"
    name = "output_config.format"
    if form.type != kind:
        raise RequestError(f"'{name}.type' must be {kind}.", f"{name}.type")
    return (AskedGuide(name, kind, _needed(form.schema_, f"{name}.schema")),)


def _tools(body: PromptFields) -> tuple[Tools | None, list[dict[str, Any]]]:
    """Return the tools that the model may call, and the tools that the prompt shows."""
    offered: dict[str, Tool] = {}
    for place, tool in enumerate(body.tools or ()):
        _check_tool(tool, place, offered)
        offered[tool.name] = Tool(tool.name, tool.input_schema or {}, bool(tool.strict))
    choice = body.tool_choice
    kind = choice.type if choice is not None else "auto"
    if kind in ("any", "tool") and not offered:
        raise RequestError("'tool_choice' needs 'tools'.", "tool_choice")
    if kind == "none" or not offered:
        return None, []
    named = _needed(choice.name, "tool_choice.name") if choice is not None and kind == "tool" else None
    tools = chosen_tools(
        offered,
        _MODES[kind],
        None if named is None else [named],
        parallel=choice is None or not choice.disable_parallel_tool_use,
        field="tool_choice",
        param="tools",
        schemas=[f"tools.{place}.input_schema" for place in range(len(offered))],
    )
    return tools, [_shown(tool) for tool in body.tools or ()]


def _check_tool(tool: MessageTool, place: int, before: dict[str, Tool]) -> None:
    if tool.type not in (None, "custom"):
        param = f"tools.{place}.type"
        message = f"This server does not have Anthropic's tool '{shown(tool.type)}': '{param}' must be custom."
        raise RequestError(message, param, "unsupported_parameter")
    if tool.name in before:
        param = f"tools.{place}.name"
        raise RequestError(f"'{param}' is the name of another tool, too.", param)


def _shown(tool: MessageTool) -> dict[str, Any]:
    """Return a tool as templates expect it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _conversation(body: PromptFields, tools: list[dict[str, Any]]) -> Conversation:
    turns = _Dialogue()
    if body.system:
        texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
        texts = [text for text in (_BILLING.sub("", text) for text in texts) if text]
        if texts:
            turns.turn("system").parts += texts
    for place, message in enumerate(body.messages):
        turns.add(message, f"messages.{place}.content")
    last = body.messages[-1].role == "assistant"
    if last and turns.last.calls:
        raise RequestError("The last message has tool_use without its result.", f"messages.{len(body.messages) - 1}")
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables = dict.fromkeys(("enable_thinking", "thinking"), body.thinking.type != "disabled")
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    return Conversation(
        messages=[turn.message() for turn in turns.all],
        media=[part for turn in turns.all for part in turn.parts if isinstance(part, MediaRef)],
        tools=tools,
        continue_final_message=last,
        variables=variables,
    )


@dataclass(slots=True)
class _Said:
    """A message as templates expect it."""

    role: str
    parts: list[str | MediaRef] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    """Id and name of the call that a tool result answers."""

    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": self.role, **self.answers}
        if any(isinstance(part, MediaRef) for part in self.parts):
            found["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.parts
            ]
        else:
            found["content"] = "\n".join(map(str, self.parts))
        if self.calls:
            found["tool_calls"] = self.calls
        if reasoning := "\n".join(filter(None, self.reasoning)):
            found |= {"reasoning_content": reasoning, "thinking": reasoning}
        return found


class _Dialogue:
    """The messages of a conversation. Several of the same role in a row are one."""

    def __init__(self) -> None:
        self.all: list[_Said] = []
        self._called: dict[str, str] = {}
        """Names of tools, by the ids of calls."""

    @property
    def last(self) -> _Said:
        return self.all[-1]

    def turn(self, role: str) -> _Said:
        """Return the current turn if it has this role, or a new one."""
        if not self.all or self.last.role != role:
            self.all.append(_Said(role))
        return self.last

    def add(self, message: MessageParam, param: str) -> None:
        """Add a message. Raises RequestError, which names a field below `param`."""
        role = message.role
        if isinstance(message.content, str):
            self.turn(role).parts.append(message.content)
            return
        parts: list[str | MediaRef] = []
        calls: list[dict[str, Any]] = []
        reasoning: list[str] = []
        results = False
        for place, block in enumerate(message.content):
            spelled = f"{param}.{place}"
            _check_type(block.type, _TYPES[role], spelled)
            match block.type:
                case "tool_result":
                    results = True
                    parts += self._answer(block, spelled)
                case "tool_use":
                    calls.append(self._call(block, spelled))
                case "thinking":
                    reasoning.append(_needed(block.thinking, f"{spelled}.thinking"))
                case "redacted_thinking":
                    pass
                case "tool_addition" | "tool_removal":
                    parts.append(_change_of_tools(block, spelled))
                case _:
                    parts.append(_part(block, spelled))
        if parts or not results:
            turn = self.turn(role)
            turn.parts += parts
            turn.calls += calls
            turn.reasoning += reasoning

    def _call(self, block: ContentBlock, param: str) -> dict[str, Any]:
        call_id = _needed(block.id, f"{param}.id")
        name = self._called[call_id] = _needed(block.name, f"{param}.name")
        function = {"name": name, "arguments": _needed(block.input, f"{param}.input")}
        return {"id": call_id, "type": "function", "function": function}

    def _answer(self, block: ContentBlock, param: str) -> list[str | MediaRef]:
        """Add the turn of a tool's result. Return its images, which templates accept in a user's turn only."""
        call_id = _needed(block.tool_use_id, f"{param}.tool_use_id")
        texts: list[str] = []
        images: list[str | MediaRef] = []
        for place, inner in enumerate(block.content if isinstance(block.content, list) else ()):
            spelled = f"{param}.content.{place}"
            _check_type(inner.type, _INNER_TYPES, spelled)
            part = _part(inner, spelled)
            if isinstance(part, str):
                texts.append(part)
            else:
                images.append(part)
        if isinstance(block.content, str):
            texts = [block.content]
        elif images and not texts:
            texts = ["The result is an image, which follows."]
        said = "\n".join(texts)
        answers = {"tool_call_id": call_id}
        if call_id in self._called:
            answers["name"] = self._called[call_id]
        self.all.append(_Said("tool", [f"Error: {said}" if block.is_error else said], answers=answers))
        return images


def _check_type(given: str, known: Sequence[str], param: str) -> None:
    if given not in known:
        message = f"'{param}.type' must be {', '.join(known)}, not '{shown(given)}'."
        raise RequestError(message, f"{param}.type", "unsupported_content")


def _change_of_tools(block: ContentBlock, param: str) -> str:
    """Return a change of the available tools as a text: the prompt has had all of them since its beginning."""
    tool = _needed(block.tool, f"{param}.tool")
    _check_type(tool.type, ("tool_reference",), f"{param}.tool")
    name = _needed(tool.name, f"{param}.tool.name")
    return f"The tool {name} is {'available' if block.type == 'tool_addition' else 'no longer available'}."


def _part(block: InnerBlock, param: str) -> str | MediaRef:
    """Return a text, an image, a document's text, or what a search for tools has found."""
    if block.type == "text":
        return _needed(block.text, f"{param}.text")
    if block.type == "tool_reference":
        return f"The tool {_needed(block.tool_name, f'{param}.tool_name')} is available."
    source = _needed(block.source, f"{param}.source")
    spelled = f"{param}.source"
    if block.type == "image":
        return MediaRef(_image_url(source, spelled), "auto", spelled)
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        raise _unsupported("citations", f"{param}.citations")
    return "\n".join(text for text in (block.title, block.context, _document(source, spelled)) if text)


def _image_url(source: BlockSource, param: str) -> str:
    if source.type == "url":
        return _needed(source.url, f"{param}.url")
    if source.type != "base64":
        raise _wrong_source(source, "base64 or url", param)
    media_type = _needed(source.media_type, f"{param}.media_type")
    if not _MEDIA_TYPE.fullmatch(media_type):
        raise RequestError(f"'{param}.media_type' must be that of an image.", f"{param}.media_type")
    return f"data:{media_type};base64,{_needed(source.data, f'{param}.data')}"


def _document(source: BlockSource, param: str) -> str:
    if source.type == "text":
        return _needed(source.data, f"{param}.data")
    if source.type != "content":
        raise _wrong_source(source, "text or content (no PDF)", param)
    if isinstance(source.content, list):
        return "\n".join(block.text for block in source.content)
    return _needed(source.content, f"{param}.content")


def _wrong_source(source: BlockSource, known: str, param: str) -> RequestError:
    message = f"'{param}.type' must be {known}, not '{shown(source.type)}'."
    return RequestError(message, f"{param}.type", "unsupported_content")


def _unsupported(what: str, param: str) -> RequestError:
    return RequestError(f"This server does not support {what} ('{param}').", param, "unsupported_content")


def _needed(value: T | None, param: str) -> T:
    if value is None:
        raise RequestError(f"'{param}' is missing.", param)
    return value


ENDPOINT = Endpoint(
    path="/v1/messages",
    name="messages",
    summary="Create a message",
    description="Answer a conversation as Anthropic's API does. With `stream` the answer is a stream of named events.",
    body=MessagesRequest,
    chunk="MessageEvent",
    answer=WholeMessage,
    convert=convert,
    shape=MessageShape,
    framing=MessageEvents(),
    error=MessagesErrorEnvelope,
)

router = APIRouter(tags=["generation"])


@router.post(
    COUNT_PATH,
    summary="Count the tokens of a message's prompt",
    responses={"4XX": {"model": MessagesErrorEnvelope}, "5XX": {"model": MessagesErrorEnvelope}},
    openapi_extra=request_body(CountTokensRequest),
)
async def count_tokens(
    request: Request,
    state: StateDep,
    service: ChatServiceDep,
    body: Annotated[CountTokensRequest, Depends(json_body(CountTokensRequest))],
) -> TokensCount:
    """The number of tokens that the prompt of the same request to /v1/messages has."""

    def convert() -> Ask:
        service.fields.check(body)
        return prompt_of(body)

    ask = await converted(state, convert)
    return TokensCount(input_tokens=len(await while_connected(request, service.processor.tokenize(ask))))
