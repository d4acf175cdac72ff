"""Images within a body, cut out before it is parsed: parsing copies them, which holds up the event loop."""

import secrets
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo


class CutUrls:
    """The data URLs that were cut out of one body, as the context of its validation, which puts them back."""

    def __init__(self) -> None:
        self._mark = f"data:cut-{secrets.token_hex(16)}-"
        self._urls: dict[str, str] = {}
        self._restored: set[str] = set()

    def cut(self, url: str) -> str:
        """What stands in the place of `url`, and needs no escapes in JSON."""
        mark = f"{self._mark}{len(self._urls)}"
        self._urls[mark] = url
        return mark

    def restore(self, text: str) -> str:
        """The URL that `text` stands for, or `text`."""
        if text not in self._urls:
            return text
        self._restored.add(text)
        return self._urls[text]

    @property
    def whole(self) -> bool:
        """Whether everything is back."""
        return len(self._restored) == len(self._urls)


def _restored(text: str, info: ValidationInfo) -> str:
    return info.context.restore(text) if isinstance(info.context, CutUrls) else text


LongUrl = Annotated[str, AfterValidator(_restored)]
"""A URL that may have been cut out."""
