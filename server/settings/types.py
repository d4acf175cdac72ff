"""Kinds of settings that several of them have: lists with commas, and addresses of replicas."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import NoDecode


def _comma_separated(value: object) -> object:
    if not isinstance(value, str):
        return value
    parts = tuple(part.strip() for part in value.split(",") if part.strip())
    if value and not parts:  # API_KEYS="," was meant to close the server
        raise ValueError("names nothing; leave it empty or out for none")
    return parts


def _addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    for url in value:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "dns+http") or not parts.hostname or parts.port is None:
            raise ValueError("each must be http://host:port, https://host:port or dns+http://name:port")
        if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
            raise ValueError("nothing may follow the port, or come before the host")
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_separated)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_comma_separated)]
Urls = Annotated[Names, AfterValidator(_addresses)]
