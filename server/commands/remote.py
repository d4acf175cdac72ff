"""Requests of commands to a running server, and the flags that name it."""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from ipaddress import ip_address
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pydantic import ValidationError
from pydantic_settings import SettingsError

from server.settings import read_settings
from server.settings.flags import FlagParser


class RemoteError(Exception):
    """The server does not answer, or refuses; the message says why, and what helps."""


NAMED_BY_URL = {"--host": "--url", "--port": "--url"}
"""Flags of servers that clients may be given, and what names a server to them."""


def add_server_flags(parser: FlagParser) -> None:
    """Add the flags that name a server. The defaults are those of a server started with the settings here."""
    url, _ = _own()
    parser.add_argument("--url", default=url, metavar="URL", help=f"the server (default: {url})")
    parser.meant |= NAMED_BY_URL
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key (default: for that server or this machine, the first of API_KEYS)"
    )
    parser.add_argument("--model", default="", metavar="NAME", help="model (default: the one that is served)")


def named_server(args: Namespace) -> "Remote":
    """Return the server that the flags name. The API key is sent to our own server only."""
    url, key = _own()
    remote = Remote(args.url, args.api_key or "")
    if args.api_key is None and (remote.url == url or _is_loopback(remote.url)):
        return Remote(args.url, key)
    return remote


def _is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # another name, or no URL at all
        return False


def _own() -> tuple[str, str]:
    """Return the URL of a server with the settings of this folder, and its first API key."""
    try:
        settings = read_settings([])
    except (ValidationError, SettingsError):  # `serve` reports them
        return "http://127.0.0.1:8000", ""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    return f"http://{host}:{settings.port}", next((key.get_secret_value() for key in settings.api_keys), "")


class Remote:
    """An OpenAI-compatible server. Methods raise RemoteError."""

    def __init__(self, url: str, key: str, timeout: float = 600.0) -> None:
        base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self.url = base
        self.key = key
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._timeout = timeout

    def models(self) -> list[str]:
        """Return the names of the models that the server has."""
        with closing(self._ask("/v1/models")) as response:
            return [entry["id"] for entry in json.load(response)["data"]]

    def model(self, asked: str = "") -> str:
        """Return the model that was asked for, or else the first."""
        if asked:
            return asked
        if not (present := self.models()):
            raise RemoteError(f"{self.url} serves no model")
        return present[0]

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed chat. Closing the iterator aborts the request."""
        with closing(self._ask("/v1/chat/completions", {**body, "stream": True})) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                        continue
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        raise RemoteError(str(chunk["error"].get("message", chunk["error"])))
                    yield chunk
            except (OSError, HTTPException) as error:
                raise RemoteError(f"the connection to {self.url} was lost ({error})") from error

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self.url + path, data, self.headers)
            return urlopen(request, timeout=self._timeout)  # type: ignore[no-any-return]
        except HTTPError as error:
            raise RemoteError(_message(error)) from error
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise RemoteError(
                f"no server answers at {self.url} ({reason}); start one with: trellis serve, or name another with --url"
            ) from error


def _message(error: HTTPError) -> str:
    """Return the message of an error of the API, or else the status."""
    try:
        text = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        text = error.reason
    hint = "; give it with --api-key" if error.code == 401 else ""
    return f"HTTP {error.code}: {text}{hint}"
