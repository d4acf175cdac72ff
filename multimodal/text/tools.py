"""Tools for a chat template that has no place for them: texts as Hermes' and Qwen's templates write them."""

import json
from collections.abc import Sequence
from typing import Any

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


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return messages with the tools in the system message, calls in the assistant's text, results in a user's."""
    if not tools and not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return messages
    found = [_as_text(message) for message in messages]
    if tools:
        text = _INSTRUCTIONS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if found[0]["role"] in ("system", "developer"):
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


def _joined(first: Any, second: Any) -> Any:
    """Join two contents, each a text or a list of parts, with a line break."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    parts = [[{"type": "text", "text": part}] if isinstance(part, str) else part for part in (first, second)]
    return [*parts[0], *parts[1]]
