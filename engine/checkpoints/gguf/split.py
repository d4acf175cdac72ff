"""Names of GGUF files: a model may be split into several, `NAME-00001-of-00003.gguf` and so on."""

import re
from pathlib import Path

from engine.errors import EngineFailure

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def parts_of(path: Path) -> list[Path]:
    """Return the files of the model that `path` is, or is a part of. Raises EngineFailure if a part is missing."""
    split = _SHARD.fullmatch(path.name)
    if not split:
        return [path]
    count = int(split["count"])
    parts = [path.with_name(f"{split['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise EngineFailure(
            f"{path} is a part of a model in {count} files, and {path.parent} lacks {', '.join(missing[:3])}: "
            "download all parts into one folder"
        )
    return parts or [path]


def stem_of(path: Path) -> str:
    """Return the name of a GGUF model: its file's without the ending, and without the number of a part."""
    split = _SHARD.fullmatch(path.name)
    return split["stem"] if split else path.stem
