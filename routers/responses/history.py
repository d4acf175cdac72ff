"""Items of Responses as the messages of a conversation."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from multimodal.answers.responses import unseal
from multimodal.errors import RequestError, shown
from multimodal.request import MediaRef
from protocol.responses import InputItem, InputPart

_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_IGNORED = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"}
    | {"mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"}
    | {"tool_search_call", "tool_search_output"}
)
"""Items of tools that OpenAI ran: the answers after them contain their results."""
SUMMARY = "Summary of the conversation before this message:\n"


class InputEntry(NamedTuple):
    """An item, and the field of the request that it comes from."""

    param: str
    item: InputItem


class Messages:
    """Makes messages, as templates expect them, of items: what an assistant did in one turn is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.media: list[MediaRef] = []
        self._turn: dict[str, Any] | None = None
        """The assistant's message to which calls and text may still be added."""
        self._calls: set[str] = set()
        self._compacted = False
        """Whether earlier items were replaced by a summary."""

    def add(self, entries: Iterable[InputEntry]) -> "Messages":
        """Take the next items. Raises RequestError."""
        for param, item in entries:
            match item.type or ("message" if item.role is not None else None):
                case "message":
                    self._message(item, param)
                case "reasoning":
                    self._reasoning(item, param)
                case "function_call":
                    self._call(item, _needed(item.arguments, f"{param}.arguments"), param)
                case "custom_tool_call":
                    self._call(item, json.dumps({"input": _needed(item.input, f"{param}.input")}), param)
                case "function_call_output" | "custom_tool_call_output":
                    call = _needed(item.call_id, f"{param}.call_id")
                    if call not in self._calls and not self._compacted:
                        said = f"No call before this output has the call_id '{shown(call)}'."
                        raise RequestError(said, f"{param}.call_id")
                    self._result(call, self._content(item.output, f"{param}.output"))
                case "compaction":
                    text = unseal(_needed(item.encrypted_content, f"{param}.encrypted_content"))
                    if text is None:
                        raise _sealed_elsewhere(param)
                    self._append({"role": "user", "content": SUMMARY + text})
                    self._compacted = True
                case kind if kind not in _IGNORED:
                    said = (
                        "is missing"
                        if kind is None
                        else f"must be a type of item that this server supports, not '{shown(kind)}'"
                    )
                    raise RequestError(f"'{param}.type' {said}.", f"{param}.type", "unsupported_content")
        return self

    def _append(self, message: dict[str, Any]) -> None:
        self._turn = None
        self.messages.append(message)

    def _result(self, call: str, content: str | list[dict[str, Any]]) -> None:
        """Add the result of a call. Templates show media in a user's messages only, so those of a result follow."""
        media = []
        if not isinstance(content, str):
            media = [part for part in content if part["type"] != "text"]
            content = "\n".join(part["text"] for part in content if part["type"] == "text")
        self._append({"role": "tool", "tool_call_id": call, "content": content})
        if media:
            self._append({"role": "user", "content": media})

    def _message(self, item: InputItem, param: str) -> None:
        if item.role is None:
            raise RequestError(f"'{param}.role' is missing.", f"{param}.role")
        content = self._content(item.content, f"{param}.content")
        if item.role != "assistant":
            self._append({"role": item.role, "content": content})
            return
        self._assistant(fresh=self._said)["content"] = content

    def _reasoning(self, item: InputItem, param: str) -> None:
        parts = item.content or item.summary or []
        text = parts if isinstance(parts, str) else "\n".join(part.text or "" for part in parts)
        if not text and item.encrypted_content:
            found = unseal(item.encrypted_content)
            if found is None:
                raise _sealed_elsewhere(param)
            text = found
        self._assistant(fresh=self._said).update(reasoning_content=text, thinking=text)

    def _call(self, item: InputItem, arguments: str, param: str) -> None:
        call_id = _needed(item.call_id, f"{param}.call_id")
        name = known_name(item.namespace, _needed(item.name, f"{param}.name"))
        function = {"name": name, "arguments": _object(arguments, item, param)}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant(fresh=False).setdefault("tool_calls", []).append(call)
        self._calls.add(call_id)

    @property
    def _said(self) -> bool:
        """Whether the assistant's message has text or calls; reasoning cannot be added after them."""
        return self._turn is not None and (bool(self._turn["content"]) or "tool_calls" in self._turn)

    def _assistant(self, *, fresh: bool) -> dict[str, Any]:
        """Return the current message of the assistant, or a new one."""
        if self._turn is None or fresh:
            self._append({"role": "assistant", "content": ""})
            self._turn = self.messages[-1]
        return self._turn

    def _content(self, content: str | Sequence[InputPart] | None, param: str) -> str | list[dict[str, Any]]:
        if content is None:
            raise RequestError(f"'{param}' is missing.", param)
        if isinstance(content, str):
            return content
        parts = list(self._parts(content, param))
        if any(part["type"] != "text" for part in parts):
            return parts
        return "\n".join(part["text"] for part in parts)

    def _parts(self, content: Sequence[InputPart], param: str) -> Iterator[dict[str, Any]]:
        for place, part in enumerate(content):
            spelled = f"{param}.{place}"
            if part.type in _TEXTS:
                name = "refusal" if part.type == "refusal" else "text"
                yield {"type": "text", "text": _needed(getattr(part, name), f"{spelled}.{name}")}
            elif part.type == "input_image":
                if part.file_id is not None:
                    raise RequestError(
                        "This server does not support 'file_id'.", f"{spelled}.file_id", "unsupported_content"
                    )
                url = _needed(part.image_url, f"{spelled}.image_url")
                detail = "high" if part.detail == "original" else part.detail
                self.media.append(MediaRef(url, detail or "auto", f"{spelled}.image_url"))
                yield {"type": "image"}
            elif part.type == "input_audio":
                if part.input_audio is None:
                    raise RequestError(f"'{spelled}.input_audio' is missing.", f"{spelled}.input_audio")
                self.media.append(MediaRef(part.input_audio.url, "auto", f"{spelled}.input_audio", "audio"))
                yield {"type": "audio"}
            else:
                known = "input_text, output_text, refusal, input_image or input_audio"
                said = f"'{spelled}.type' must be {known}, not '{shown(part.type)}'."
                raise RequestError(said, f"{spelled}.type", "unsupported_content")


def known_name(namespace: str | None, name: str) -> str:
    """Return a tool's name for the model, which includes its namespace."""
    return f"{namespace}__{name}" if namespace else name


def _needed(value: str | None, param: str) -> str:
    if not value and (value is None or param.endswith(("image_url", "call_id", "name"))):
        raise RequestError(f"'{param}' is missing.", param)
    return value or ""


def _object(arguments: str, item: InputItem, param: str) -> Any:
    """Return a call's arguments as an object, or as text if the model broke off inside them."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        if item.status == "incomplete":
            return arguments
        raise RequestError(f"'{param}.arguments' must be a JSON object, as text.", f"{param}.arguments")
    return found


def _sealed_elsewhere(param: str) -> RequestError:
    name = f"{param}.encrypted_content"
    return RequestError(f"'{name}' is not by this server.", name, "invalid_encrypted_content")
