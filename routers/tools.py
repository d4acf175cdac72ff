"""Tools of a chat: those that a request offers the model, and its rules for choosing among them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from multimodal.errors import RequestError, shown
from multimodal.request import Tool, Tools
from protocol.chat import ChatCompletionRequest, FunctionDefinition, FunctionTool


def tools_of(body: ChatCompletionRequest) -> tuple[Tools | None, list[dict[str, Any]]]:
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


def chosen_tools(
    offered: Mapping[str, Tool],
    mode: str,
    allowed: Sequence[str] | None,
    *,
    parallel: bool,
    field: str,
    param: str,
    schemas: Sequence[str],
) -> Tools:
    """Return the tools that the model may call: all of those offered, or the `allowed`. `field` has the choice, `param`
    the tools. Raises RequestError.
    """
    for missing in (other for other in allowed or () if other not in offered):
        raise RequestError(f"{field!r} names '{shown(missing)}', which is not in {param!r}.", field)
    chosen = offered if allowed is None else {name: offered[name] for name in offered if name in allowed}
    strict = (
        re.sub(r"[^.]+\Z", "format" if tool.text is not None else "strict", place)
        for tool, place in zip(offered.values(), schemas, strict=True)
        if tool.strict and tool.name in chosen
    )
    guided = next(strict, "")
    return Tools(
        offered=chosen,
        mode="auto" if mode == "auto" else "required",
        parallel=parallel and mode != "function",
        guided=field if mode != "auto" or len(chosen) < len(offered) else guided,
        param=param,
        schemas=tuple(schemas),
    )


def template_tools(functions: Sequence[FunctionDefinition]) -> list[dict[str, Any]]:
    """Return tools as templates expect them. They do not say whether a tool is strict."""
    return [
        {"type": "function", "function": function.model_dump(exclude_unset=True, exclude={"strict"})}
        for function in functions
    ]


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
    """Return how the model chooses (auto, required or one function), and among which tools; None for all."""
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
