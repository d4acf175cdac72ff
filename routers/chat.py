"""POST /v1/chat/completions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.media import FrameSampling, MediaKind
from multimodal.answers.shapes import ChatShape
from multimodal.errors import RequestError, shown
from multimodal.request import Ask, Conversation, MediaRef, Tool, Tools
from protocol.chat import (
    ChatCompletion,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    FunctionTool,
    ImageUrl,
    MessageFunctionCall,
)
from protocol.tokenize import TokenizeRequest
from routers.endpoint import Endpoint
from routers.fields import effort_of, to_ask
from routers.tools import chosen_tools, template_tools

_TEXT_PARTS = ("text", "input_text", "refusal")
MEDIA_PARTS: dict[str, MediaKind] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Fields and types of content parts that contain or refer to a file, and the file's kind."""
REFUSED_PARTS = frozenset({"file"})
"""Fields, and types, of content parts that are not supported."""


def convert(body: ChatCompletionRequest) -> Ask:
    """Return the request of a body. Raises RequestError."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    variables = effort_of(body.reasoning_effort)
    if body.documents is not None:
        variables["documents"] = body.documents
    fields = {"prompt": "messages", "logprobs": "top_logprobs"}
    own: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
    if body.max_completion_tokens is not None:
        own["max_tokens"] = body.max_completion_tokens
        fields["max_tokens"] = "max_completion_tokens"
    own["tools"], shown_tools = _tools_of(body)
    own["include_reasoning"] = body.include_reasoning is not False
    fields["reasoning_budget"], own["reasoning_budget"] = _reasoning_budget(body)
    return to_ask(body, conversation(body, body.messages, variables, shown_tools), fields, **own)


def _reasoning_budget(body: ChatCompletionRequest) -> tuple[str, int | None]:
    """Return the body's name for the budget of reasoning, and its value."""
    named = {
        "thinking_token_budget": body.thinking_token_budget,
        "thinking_budget": body.thinking_budget,
        "nvext.max_thinking_tokens": body.nvext.max_thinking_tokens if body.nvext is not None else None,
    }
    return next(((name, value) for name, value in named.items() if value is not None), ("thinking_token_budget", None))


def conversation(
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    variables: dict[str, Any],
    tools: list[dict[str, Any]],
) -> Conversation:
    """Return the conversation of a body. Raises RequestError."""
    return Conversation(
        messages=[to_template(message, place) for place, message in enumerate(messages)],
        media=list(_media_refs(messages, _sampling(body))),
        tools=tools,
        as_sent=True,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        variables=variables,
    )


def to_template(message: ChatMessage, place: int = 0) -> dict[str, Any]:
    """Return the message at `place` as templates expect it (`Conversation`). Raises RequestError."""
    if message.audio is not None:
        raise _unsupported("This server does not support 'audio' in a message.")
    role = "tool" if message.role == "function" else message.role
    found: dict[str, Any] = {"role": role, "content": _content(message, f"messages.{place}.content")}
    given = {"name": message.name, "tool_call_id": message.tool_call_id}
    found |= {name: value for name, value in given.items() if value is not None}
    spelled = f"messages.{place}.tool_calls"
    if message.tool_calls:
        found["tool_calls"] = [
            call.model_dump(exclude_unset=True) | {"function": _called(call.function, f"{spelled}.{index}")}
            for index, call in enumerate(message.tool_calls)
        ]
    elif message.function_call is not None:
        function = _called(message.function_call, f"messages.{place}.function_call")
        found["tool_calls"] = [{"type": "function", "function": function}]
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        found |= {"reasoning_content": reasoning, "thinking": reasoning}
    return found


def _sampling(body: ChatCompletionRequest | TokenizeRequest) -> FrameSampling:
    """Return the choice of frames of videos that the body asks for. Raises RequestError."""
    named = {
        "media_io_kwargs.video": body.media_io_kwargs.video if body.media_io_kwargs is not None else None,
        "mm_processor_kwargs": body.mm_processor_kwargs,
    }
    given = {name: options for name, options in named.items() if options is not None}
    if len(given) > 1:
        raise RequestError("'mm_processor_kwargs' cannot be used with 'media_io_kwargs'.", "mm_processor_kwargs")
    for name, options in given.items():
        if options.model_extra:
            param = name.partition(".")[0]
            raise RequestError(f"'{name}' takes 'fps' and 'num_frames' alone.", param, "unsupported_parameter")
        return FrameSampling(options.fps or 0.0, options.num_frames or 0)
    return FrameSampling()


def _media_refs(messages: Sequence[ChatMessage], sampling: FrameSampling) -> Iterator[MediaRef]:
    for place, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            kind = MEDIA_PARTS.get(part.type)
            given = getattr(part, part.type) if kind is not None else None
            if kind is None or given is None:
                continue
            url = given if isinstance(given, str) else given.url
            detail = given.detail if isinstance(given, ImageUrl) and given.detail != "original" else None
            param = f"messages.{place}.content.{index}.{part.type}"
            yield MediaRef(url, detail or "auto", param, kind, sampling if kind == "video" else FrameSampling())


def _content(message: ChatMessage, param: str) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role != "assistant":
            raise RequestError(f"The content of a {message.role} message must not be null.", param)
        return message.refusal or ""
    parts = [_part(part, f"{param}.{index}") for index, part in enumerate(message.content)]
    if not any(part.type in MEDIA_PARTS for part in message.content):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: ContentPart, param: str) -> dict[str, Any]:
    """Return a part as templates expect it. Raises RequestError."""
    if part.type in _TEXT_PARTS:
        name = "refusal" if part.type == "refusal" else "text"
        if (text := getattr(part, name)) is None:
            raise RequestError(f"'{param}' has no text.", f"{param}.{name}")
        return {"type": "text", "text": text}
    if part.type not in MEDIA_PARTS:
        raise _wrong_type(part.type, f"{param}.type")
    given = getattr(part, part.type)
    if not (given if isinstance(given, str | None) else given.url):
        raise RequestError(f"'{param}.{part.type}' is missing, or has no URL.", f"{param}.{part.type}")
    return {"type": MEDIA_PARTS[part.type]}


def _wrong_type(given: str, param: str) -> RequestError:
    if given in REFUSED_PARTS:
        return _unsupported(f"This server does not support content parts of type {given!r}.", param)
    *known, last = (*_TEXT_PARTS, *MEDIA_PARTS)
    return _unsupported(f"'{param}' must be {', '.join(known)} or {last}, not '{shown(given)}'.", param)


def _unsupported(message: str, param: str = "messages") -> RequestError:
    return RequestError(message, param, "unsupported_content")


def _called(function: MessageFunctionCall, param: str) -> dict[str, Any]:
    """Return a call as templates expect it: its arguments, which OpenAI writes as JSON text, as an object."""
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise RequestError(f"The arguments of '{param}' are not valid JSON.", param) from None
        if not isinstance(arguments, dict):
            raise RequestError(f"The arguments of '{param}' must be a JSON object.", param)
    return function.model_dump(exclude_unset=True) | {"arguments": arguments}


def _tools_of(body: ChatCompletionRequest) -> tuple[Tools | None, list[dict[str, Any]]]:
    """Return the tools that the model may call, and those that the prompt shows. Raises RequestError."""
    legacy = body.functions is not None
    if legacy and body.tools is not None:
        raise RequestError("'tools' and 'functions' exclude each other.", "functions")
    name = "functions" if legacy else "tools"
    functions = body.functions or [_function(tool, place) for place, tool in enumerate(body.tools or ())]
    spelled = "functions.{}" if legacy else "tools.{}.function"
    offered = _named(functions, spelled)
    field = "function_call" if legacy else "tool_choice"
    choice: Any = body.function_call if legacy else body.tool_choice
    if body.function_call is not None and not legacy and body.function_call not in ("none", "auto"):
        raise RequestError("'function_call' needs 'functions'.", "function_call")
    if not offered:
        if choice not in (None, "none", "auto"):
            raise RequestError(f"{field!r} needs {name!r}.", field)
        return None, []
    if choice == "none":
        return None, []
    mode, allowed = _choice(choice, field)
    return chosen_tools(
        offered,
        mode,
        allowed,
        parallel=not legacy and body.parallel_tool_calls is not False,
        field=field,
        param=name,
        schemas=[f"{spelled.format(place)}.parameters" for place in range(len(functions))],
    ), template_tools(functions)


def shown_tools(tools: Sequence[FunctionTool] | None) -> list[dict[str, Any]]:
    """Return the tools of a body that generates nothing, as templates expect them. Raises RequestError."""
    return template_tools([_function(tool, place) for place, tool in enumerate(tools or ())])


def _function(tool: FunctionTool, place: int) -> FunctionDefinition:
    if tool.type != "function" or tool.function is None:
        param = f"tools.{place}.type" if tool.type != "function" else f"tools.{place}.function"
        said = f"must be 'function', not '{shown(tool.type)}'" if tool.type != "function" else "is missing"
        raise RequestError(f"'{param}' {said}.", param, "unsupported_parameter" if tool.type != "function" else None)
    return tool.function


def _named(functions: Sequence[FunctionDefinition], spelled: str) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for place, function in enumerate(functions):
        param = f"{spelled.format(place)}.name"
        if function.name in found:
            raise RequestError(f"'{param}' is the name of another tool, too.", param)
        found[function.name] = Tool(function.name, function.parameters or {}, bool(function.strict))
    return found


def _choice(choice: Any, field: str) -> tuple[str, Sequence[str] | None]:
    """Return the tool choice (auto, required or one function) and the names of the allowed tools; None allows all."""
    if choice in (None, "auto"):
        return "auto", None
    if choice == "required" and field == "tool_choice":
        return "required", None
    if isinstance(choice, Mapping):
        if field == "function_call" and isinstance(choice.get("name"), str):
            return "function", [choice["name"]]
        match choice.get("type"):
            case "function":
                return "function", [_name(choice, field)]
            case "allowed_tools":
                return _allowed(choice.get("allowed_tools"), field)
    kinds = (
        "none, auto, required, a function or allowed_tools" if field == "tool_choice" else "none, auto or a function"
    )
    raise RequestError(f"{field!r} must be {kinds}.", field)


def _allowed(allowed: Any, field: str) -> tuple[str, Sequence[str]]:
    param = f"{field}.allowed_tools"
    if not isinstance(allowed, Mapping) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
        raise RequestError(f"'{param}.tools' must name at least one tool.", f"{param}.tools")
    if (mode := allowed.get("mode")) not in ("auto", "required"):
        raise RequestError(f"'{param}.mode' must be auto or required.", f"{param}.mode")
    return mode, [_name(tool, f"{param}.tools.{place}") for place, tool in enumerate(allowed["tools"])]


def _name(tool: Any, param: str) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"'{param}.function.name' is missing.", f"{param}.function.name")
    return name


ENDPOINT = Endpoint(
    path="/v1/chat/completions",
    name="chat_completions",
    summary="Create a chat completion",
    description=(
        "Answer a chat. With `stream` the answer is a stream of server-sent events, closed by `data: [DONE]`."
    ),
    body=ChatCompletionRequest,
    chunk="ChatCompletionChunk",
    answer=ChatCompletion,
    convert=convert,
    shape=ChatShape,
)
