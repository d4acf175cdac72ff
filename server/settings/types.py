"""Types of settings: sections, comma-separated lists, addresses and paths."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from engine.config import EmbeddedConfig

EMBEDDED: Any = EmbeddedConfig(model="")
"""Holds the defaults of the settings that are also its fields. Any, since its types are wider than theirs."""
_LISTEN = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.%a-z]+\]|[^\s:/\[\]*]+):(\d{1,5})|ipc://\S+")
_CONNECT = re.compile(r"(tcp://(\[[^\s\]]+\]|[^\s:/\[\]*]+):\d{1,5}|ipc://\S+)")


class Section(BaseSettings):
    """Settings of one subject. A field's docstring is its description, in the help and in settings.env.example."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    group: ClassVar[str] = ""
    """Title of these settings in the help."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split()).removesuffix(".")


def _comma_separated(value: object) -> object:
    if not isinstance(value, str):
        return value
    parts = tuple(part.strip() for part in value.split(",") if part.strip())
    if value and not parts:  # API_KEYS="," was meant to close the server
        raise ValueError("names nothing; leave it empty or out for none")
    return parts


def _replica_urls(value: tuple[str, ...]) -> tuple[str, ...]:
    for url in value:
        parts = urlsplit(url)
        if parts.scheme == "file" and parts.path and not parts.netloc:
            continue
        if parts.scheme not in ("http", "https", "dns+http") or not parts.hostname or parts.port is None:
            raise ValueError("each must be http://host:port, https://host:port, dns+http://name:port or file:///path")
        if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
            raise ValueError("nothing may follow the port, or come before the host")
    return value


def _listen_address(value: str) -> str:
    found = _LISTEN.fullmatch(value)
    if value and (found is None or int(found[2] or 0) > 65535):
        raise ValueError("must be tcp://*:port, tcp://address:port or ipc://path")
    return value


def _connect_addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_CONNECT.fullmatch, value)):
        raise ValueError("each must be tcp://host:port or ipc://path")
    return value


def _json_object(value: str) -> str:
    try:
        valid = isinstance(json.loads(value or "{}"), dict)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("must be a JSON object")
    return value


def none_if_empty(value: object) -> object:
    return None if value == "" else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_separated)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_comma_separated)]
Secret = Annotated[SecretStr | None, BeforeValidator(none_if_empty)]
OptionalBool = Annotated[bool | None, BeforeValidator(none_if_empty)]
Urls = Annotated[Names, AfterValidator(_replica_urls)]
JsonObject = Annotated[str, AfterValidator(_json_object)]
"""Empty for an empty object."""
ListenAddress = Annotated[str, AfterValidator(_listen_address)]
ConnectAddresses = Annotated[Names, AfterValidator(_connect_addresses)]
ExpandedPath = Annotated[Path, AfterValidator(Path.expanduser)]
PathOrNone = Annotated[ExpandedPath | None, BeforeValidator(none_if_empty)]
