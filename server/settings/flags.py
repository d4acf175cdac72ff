"""Flags of the settings, and their help in pages."""

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import AliasChoices
from pydantic.fields import FieldInfo
from pydantic_settings import SettingsError

from server.settings.types import Section

COMMON = (
    "engine", "device", "dtype", "max_seq_len", "max_batch_size", "kv_cache_memory_mb", "free_gpu_memory_fraction",
    "threads", "host", "port", "api_keys", "api_processes", "served_model_name", "log_level",
)  # fmt: skip
"""Settings on the first page of the help."""
_UNITS = {"seconds": "SECONDS", "ms": "MS", "mb": "MIB", "kb": "KIB", "pixels": "PIXELS", "tokens": "TOKENS"}
_KINDS: dict[Any, str] = {int: "INT", float: "NUMBER", bool: "true|false", bool | None: "true|false"}
_FLAG_WIDTH = 34


class FlagParser(argparse.ArgumentParser):
    """A parser that takes underscores in flags, refuses abbreviations, and suggests the flag that was meant. Raises
    SettingsError.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})
        self.meant: dict[str, str] = {}
        """Flags that users may take for others, and those that they mean."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message.replace("unrecognized arguments", "unexpected"))

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        arguments = [dashed(argument) for argument in arguments]
        known = [flag for action in self._actions for flag in action.option_strings]
        for argument in arguments:
            name = argument.partition("=")[0]
            if name == "--":
                break
            if name.startswith("--") and name not in known:
                meant = self.meant.get(name) or nearest(name, known)
                raise SettingsError(f"unknown flag {name}{did_you_mean(meant)}")
        return self.parse_args(arguments)


def dashed(argument: str) -> str:
    """Return a flag with dashes instead of underscores; values stay as they are."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def nearest(name: str, names: Iterable[str], cutoff: float = 0.75) -> str:
    """Return the name that was probably meant; empty if none is close."""
    plain = {known.replace("-", "").replace("_", "").lower(): known for known in names}
    close = difflib.get_close_matches(name.replace("-", "").replace("_", "").lower(), plain, 1, cutoff)
    return plain[close[0]] if close else ""


def did_you_mean(name: str) -> str:
    return f"; did you mean {name}?" if name else ""


def parse_flags(settings: type[Section], arguments: Sequence[str]) -> dict[str, str]:
    """Return the settings that a command line sets, by name and unparsed. Raises SettingsError for an unknown flag.

    The model may come without its flag. A switch needs no value: `--docs` and `--no-docs` are `--docs true` and
    `--docs false`.
    """
    parser = FlagParser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("positional_model", nargs="?")
    for name, info in settings.model_fields.items():
        switch = info.annotation in (bool, bool | None)
        options: dict[str, Any] = {"nargs": "?", "const": "true"} if switch else {}
        parser.add_argument(*_flags(name, info), dest=name, action="append", **options)
        if switch:
            parser.add_argument(f"--no-{_flags(name, info)[0][2:]}", dest=name, action="append_const", const="false")
    found = vars(parser.parse(arguments))
    positional = found.pop("positional_model", None)
    if positional is not None and "model" in found:
        raise SettingsError(f"two models are given: {positional} and --model {found['model'][-1]}")
    values = {
        name: ",".join(given) if get_origin(settings.model_fields[name].annotation) is tuple else given[-1]
        for name, given in found.items()
    }
    return values if positional is None else {**values, "model": positional}


def help_page(settings: type[Section], topic: str = "") -> str:
    """Return the help on a topic: a setting, or all settings with `topic` in their name or in the title of their group.
    Without a topic, the most used ones and the titles of all groups; with `all`, everything. Raises SettingsError for
    an unknown topic.
    """
    topic = topic.strip("-").replace("-", "_").lower()
    all_groups = groups(settings)
    titles = [title for title in all_groups if topic and topic in title.lower().replace(" ", "_")]
    if topic in ("", "all"):
        chosen = all_groups if topic else {"Most used": [name for name in COMMON if name in settings.model_fields]}
    elif titles:
        chosen = {title: all_groups[title] for title in titles}
    else:
        exact = topic in settings.model_fields
        chosen = {
            title: [name for name in names if (topic == name if exact else topic in name)]
            for title, names in all_groups.items()
        }
    lines = [line for title, names in chosen.items() if names for line in _page(settings, title, names)]
    if not lines:
        raise SettingsError(f"no setting has {topic} in its name; --help lists the groups")
    if not topic:
        lines += ["More, with --help and a group, a part of a name, or all:"]
        lines += _wrapped(", ".join(title.lower() for title in all_groups), "  ")
    return "\n".join(lines)


def groups(settings: type[Section]) -> dict[str, list[str]]:
    """Return the names of the settings by the title of their section."""
    sections = [section for section in settings.__mro__ if issubclass(section, Section) and section.group]
    groups: dict[str, list[str]] = {}
    for name in settings.model_fields:
        title = next(section.group for section in sections if name in section.__annotations__)
        groups.setdefault(title, []).append(name)
    return groups


def _page(settings: type[Section], title: str, names: list[str]) -> Iterator[str]:
    yield f"{title}:"
    for name in names:
        info = settings.model_fields[name]
        flag = f"  {_flags(name, info)[0]} {_kind(name, info.annotation)}"
        default = shown(info.get_default(call_default_factory=True))
        text = f"{info.description}" + (f" (default: {default})" if default else "")
        first, *rest = _wrapped(text, " " * _FLAG_WIDTH)
        if len(flag) < _FLAG_WIDTH:
            yield flag.ljust(_FLAG_WIDTH) + first.lstrip()
        else:
            yield flag
            yield first
        yield from rest
    yield ""


def _wrapped(text: str, indent: str) -> list[str]:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _flags(name: str, info: FieldInfo) -> list[str]:
    alias = info.validation_alias
    names = alias.choices if isinstance(alias, AliasChoices) else [name]
    return [f"--{str(each).replace('_', '-')}" for each in names]


def _kind(name: str, annotation: Any) -> str:
    """Return the placeholder for a flag's value: its choices, or its unit or type."""
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if unit := _UNITS.get(name.rpartition("_")[2]):
        return unit
    if annotation in _KINDS:
        return _KINDS[annotation]
    ends = {"model": "MODEL", "host": "ADDRESS", "urls": "URLS", "url": "URL", "keys": "KEYS", "dir": "FOLDER"}
    return ends.get(name.rpartition("_")[2], "A,B" if get_origin(annotation) is tuple else "TEXT")


def shown(value: object) -> str:
    """Return a value as `.env` spells it. Secrets are masked."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else ",".join(map(shown, value)) if isinstance(value, tuple) else str(value)
