"""The text of a video in a prompt, as SmolVLM's processor writes it: an introduction, then each frame after its
time."""

from collections.abc import Sequence
from datetime import timedelta

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def video_text(frame: str, times: Sequence[float], seconds: float) -> str:
    """Return the text for frames at `times` of a video of `seconds`; `frame` stands for each of them."""
    stamps = [f"{int(time // 60):02d}:{int(time % 60):02d}" for time in times]
    return (
        f"You are provided the following series of {spelled(len(times))} frames from a "
        f"{timedelta(seconds=int(seconds))} [H:MM:SS] video.\n"
        + "".join(f"\nFrame from {stamp}:{frame}" for stamp in stamps)
        + "\n\n"
    )


def spelled(number: int) -> str:
    """Return a number from 0 to 999 in words, as `num2words` writes it."""
    if number < len(_SMALL):
        return _SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_SMALL[hundreds]} hundred" + (f" and {spelled(rest)}" if rest else "")
