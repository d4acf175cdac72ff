"""The API contract (`tests/contract/trtllm_api.json`) and what is generated from it.

These are signatures, types and defaults.
"""

import ast
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Optional, Union

from annotated_types import Ge, Gt, Le

_FOLDER = Path(__file__).resolve().parents[2] / "contract"


def _api() -> dict[str, Any]:
    """The contract of the version that FAKE_TRTLLM_VERSION names, 1.2.1 unless it is set.

    `trtllm_newest.json` says what main adds, changes and removes. Raises ValueError for any other version.
    """
    api: dict[str, Any] = json.loads((_FOLDER / "trtllm_api.json").read_text(encoding="utf-8"))
    newest = json.loads((_FOLDER / "trtllm_newest.json").read_text(encoding="utf-8"))
    wanted = os.environ.get("FAKE_TRTLLM_VERSION", api["version"])
    if wanted == newest["version"]:
        for path in newest.pop("removed"):
            *parents, last = path.split("/")
            del functools.reduce(dict.__getitem__, parents, api)[last]
        _update(api, newest)
    elif wanted != api["version"]:
        raise ValueError(f"FAKE_TRTLLM_VERSION must be {api['version']} or {newest['version']}, not {wanted}")
    return api


def _update(target: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            _update(target[name], value)
        else:
            target[name] = value


API: dict[str, Any] = _api()
__version__: str = API["version"]
NEWEST = __version__ != "1.2.1"
"""Whether this is main, which differs in behaviour too (`tests/contract/trtllm_behaviours.json`)."""

_CONSTRAINTS: dict[str, tuple[Any, ...]] = {">0": (Gt(0),), ">=0": (Ge(0),), "0<x<=1": (Gt(0), Le(1))}
_GENERICS: dict[str, Any] = {"Optional": Optional, "Union": Union, "List": list, "Dict": dict, "dict": dict, "Set": set}
_PLAIN: dict[str, Any] = {t.__name__: t for t in (str, int, float, bool, bytes, dict, Path)} | dict.fromkeys(
    ("Any", "object", "TokenizerBase", "PreTrainedTokenizerBase"), Any
)


def parse_type(text: str, names: Mapping[str, Any]) -> Any:
    """Return the type that a type text of the contract means.

    `names` are the classes that it may name. A remark in brackets after the text is a bound or is dropped. Raises
    ValueError for anything that is not a type.
    """
    match = re.fullmatch(r"(.*?)(?: \((.*)\))?", text)
    assert match is not None
    parsed = _type(ast.parse(match[1], mode="eval").body, {**_PLAIN, **names})
    bounds = _CONSTRAINTS.get(match[2] or "", ())
    return Annotated[parsed, *bounds] if bounds else parsed


def _type(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(value)):
            return Literal[value]
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_type(left, names), _type(right, names)]  # noqa: UP007 - the operands are values
        case ast.Subscript(value=ast.Name(id="Literal"), slice=index):
            return Literal[tuple(ast.literal_eval(item) for item in _items(index))]
        case ast.Subscript(value=ast.Name(id=name), slice=index) if name in _GENERICS:
            arguments = tuple(_type(item, names) for item in _items(index))
            return _GENERICS[name][arguments if len(arguments) > 1 else arguments[0]]
    raise ValueError(f"not a type of the contract: {ast.unparse(node)}")


def _items(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def build_enum(name: str, module: str) -> Any:
    """The enumeration that the contract lists under `name`."""
    entry = API["enums"][name]
    base = {"Enum": Enum, "IntEnum": IntEnum, "StrEnum": StrEnum}[entry["base"]]
    return base(name.rpartition(".")[2], entry["members"], module=module)


def signature(name: str) -> inspect.Signature:
    """The signature of a callable of the contract, without annotations."""
    return inspect.Signature([_parameter(entry) for entry in API["callables"][name]["params"]])


def _parameter(entry: dict[str, Any]) -> inspect.Parameter:
    default = entry.get("default", inspect.Parameter.empty)
    if default == []:
        default = ()
    return inspect.Parameter(entry["name"], getattr(inspect.Parameter, entry["kind"]), default=default)


def contract(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a method the signature that the contract states for `name`.

    A call that does not match it raises TypeError. The method itself receives `self` and a namespace of all the other
    arguments, with defaults filled in.
    """
    stated = signature(name)

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = stated.bind(*args, **kwargs)
            bound.apply_defaults()
            receiver, *_ = bound.args
            return method(receiver, SimpleNamespace(**dict(list(bound.arguments.items())[1:])))

        call.__signature__ = stated  # type: ignore[attr-defined]
        return call

    return decorate
