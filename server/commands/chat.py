"""`trellis chat`: talk to a running server from the terminal."""

import base64
import mimetypes
import readline  # line editing and history of input()
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from server.commands.remote import Remote, RemoteError, add_server_flags, named_server
from server.settings.flags import FlagParser

_HELP = """\
/image PATH [TEXT]  send an image; a message may also name image files by path, as a terminal does with dropped files
/system TEXT        set the system prompt and start again
/again              answer the last message again
/clear              start again
/exit               leave, as Ctrl-D does
\"\"\"                 begin and end a message of several lines
Ctrl-C stops an answer."""
_HISTORY_LINES = 1000
_IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
_SAMPLING = {
    "temperature": (float, "NUMBER", "randomness; 0 takes the likeliest token"),
    "top_p": (float, "NUMBER", "take the likeliest tokens up to this probability"),
    "max_tokens": (int, "TOKENS", "longest answer"),
    "seed": (int, "INT", "equal seeds give equal answers"),
}


def parser() -> FlagParser:
    found = FlagParser(
        prog="trellis chat",
        description="Talk to a running server. With a message, print the answer and end; input from a pipe is added.",
        epilog=f"In a chat:\n{_HELP}",
    )
    found.add_argument("message", nargs="*", help="a message; without one, chat")
    add_server_flags(found)
    found.add_argument("--image", action="append", default=[], metavar="PATH", help="an image for the message")
    found.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    for name, (kind, unit, text) in _SAMPLING.items():
        found.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar=unit, help=f"{text} (default: the server's)"
        )
    return found


def main(arguments: Sequence[str]) -> int:
    """Run `trellis chat`. Raises RemoteError if the server does not answer, or an image of the command line cannot be
    read."""
    args = parser().parse(arguments)
    sampling = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    remote = named_server(args)
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    chat = Chat(remote, remote.model(args.model), args.system, sampling)
    if args.message or piped or args.image:
        text, images = images_in(" ".join(args.message))
        chat.say("\n\n".join(filter(None, [text, piped])), [*args.image, *images])
        return 0
    chat.figures = True
    _talk(chat)
    return 0


class Chat:
    """A chat and its messages. An answer that fails or is stopped before any text leaves no trace."""

    def __init__(
        self,
        remote: Remote,
        model: str,
        system: str,
        sampling: dict[str, Any],
        write: Callable[[str], object] | None = None,
    ) -> None:
        self._remote = remote
        self.model = model
        self._fields = sampling
        self.write = write or _write
        self.figures = False
        """Whether to show the speed after each answer."""
        self.restart(system)

    def restart(self, system: str | None = None) -> None:
        """Forget all messages; a system prompt of None keeps the one there is."""
        if system is not None:
            self._system = system
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str, images: Sequence[str] = ()) -> None:
        """Send a message and write the answer as it comes. Raises RemoteError."""
        parts = [{"type": "image_url", "image_url": {"url": data_url(Path(path).expanduser())}} for path in images]
        content = [*parts, *([{"type": "text", "text": text}] if text else [])] if parts else text
        self._answer([*self.messages, {"role": "user", "content": content}])

    def again(self) -> None:
        """Answer the last message again. Raises RemoteError."""
        asked = self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else []
        if not asked:
            raise RemoteError("there is no answer yet")
        self._answer(asked)

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        began, first, answer, tokens = time.monotonic(), 0.0, "", 0
        body = {"model": self.model, "messages": messages, "stream_options": {"include_usage": True}, **self._fields}
        chunks = self._remote.chat(body)
        try:
            for chunk in chunks:
                for choice in chunk.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        first = first or time.monotonic()
                        answer += text
                        self.write(text)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        except KeyboardInterrupt:  # stops the answer; what there is of it stays
            self.write(" (stopped)")
        finally:
            chunks.close()  # type: ignore[attr-defined]
            self.write("\n" if answer else "")
        if answer:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        if self.figures and tokens and first:
            speed = (tokens - 1) / max(time.monotonic() - first, 1e-9)
            self.write(_dim(f"{tokens} tokens, the first after {first - began:.2f} s, then {speed:.1f} a second\n"))


def data_url(path: Path) -> str:
    """Return an image file as a data URL. Raises RemoteError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RemoteError(f"{path} cannot be read: {error.strerror}") from error
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def images_in(text: str) -> tuple[str, list[str]]:
    """Take the paths of image files out of a message; return the remaining text and the paths."""
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe
        words = text.split()
    paths = [word for word in words if Path(word).suffix.lower() in _IMAGES and Path(word).expanduser().is_file()]
    for path in paths:
        for spelled in (f"'{path}'", f'"{path}"', path.replace(" ", "\\ "), path):
            if spelled in text:
                text = text.replace(spelled, "", 1)
                break
    return text.strip(), paths


def _talk(chat: Chat) -> None:
    """Read messages until the end of input."""
    history = Path("~/.local/state/trellis/chat_history").expanduser()
    with suppress(OSError):
        history.parent.mkdir(parents=True, exist_ok=True)
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    _write(f"{chat.model}. Type a message, /help for more, Ctrl-D to leave.\n")
    while True:
        try:
            line = _message()
        except EOFError:
            break
        except KeyboardInterrupt:
            _write("\n")
            continue
        if line in ("/exit", "/quit", "/bye"):
            break
        try:
            _obey(chat, line)
        except RemoteError as error:
            _write(f"error: {error}\n")
        except KeyboardInterrupt:  # before the first token
            _write("\n")
    _write("\n")
    with suppress(OSError):
        readline.write_history_file(history)


def _message() -> str:
    """Read a message: one line, or several between three quotes."""
    line = input(">>> ").strip()
    if not line.startswith('"""'):
        return line
    lines = [line[3:]]
    while not lines[-1].rstrip().endswith('"""'):
        lines.append(input("... "))
    lines[-1] = lines[-1].rstrip()[:-3]
    return "\n".join(lines).strip()


def _obey(chat: Chat, line: str) -> None:
    """Carry out a command, or send a message."""
    command, _, rest = line.partition(" ")
    if command == "/help":
        _write(_HELP + "\n")
    elif command == "/clear":
        chat.restart()
    elif command == "/system":
        chat.restart(rest.strip())
    elif command == "/again":
        chat.again()
    elif command == "/image":
        text, paths = images_in(rest)
        if not paths:
            raise RemoteError(
                f"{rest.strip() or 'nothing'} is not an image file; write /image PATH, and then text if you like"
            )
        chat.say(text, paths)
    elif command.startswith("/") and not Path(command).exists():
        raise RemoteError(f"there is no command {command}; /help lists them")
    elif line:
        chat.say(*images_in(line))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text
