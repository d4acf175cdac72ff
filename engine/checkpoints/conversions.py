"""The cache of converted models: a folder each, made once by one process while the others wait.

Folders made of GGUF files are told apart by the files' digest and name the files in a record, by which they are found
again without reading the files. A process that uses such a folder locks it as long as it lives. When another
file is converted, folders that nobody uses are removed if their file is gone or has changed, and the others, those not
used for longest first, while the disk has no room.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3

from engine.checkpoints.gguf.split import parts_of, stem_of
from engine.kit.logs import size_text

if TYPE_CHECKING:
    from engine.checkpoints.tensor_file import Progress  # imports numpy, as the reader of GGUF files does

FORMAT = 2
"""Version of the conversion: increase it when the result changes, so that older folders are not used."""
INDEX = "model_index.json"
"""File of a folder of diffusers, whose parts have configurations of their own."""
_RECORD = "converted-from.json"
_SPARE = 1 << 28
"""Bytes of the disk that conversions leave free."""

log = logging.getLogger(__name__)

_used: dict[Path, int] = {}
"""Folders that this process uses, each with a handle that holds a shared lock."""


class ModelError(Exception):
    """The model setting cannot be resolved; the message says why and what to do."""


class Conversion(NamedTuple):
    """A folder made of a GGUF file."""

    folder: Path
    sources: list[list[Any]]
    """Path, size and times of each file at that time."""

    @property
    def source(self) -> Path:
        """The GGUF file, or the first one of a split model."""
        return Path(self.sources[0][0])


def converted(folder: Path, what: str, make: "Callable[[Path, Progress], None]") -> Path:
    """Return `folder`, which `make` fills if it does not exist. The result is checked, and remains of a killed process
    are removed. Raises ModelError, EngineFailure and OSError.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{folder.name}.lock"):
        if not folder.is_dir():
            _convert(folder, what, make)
    return folder


def converted_gguf(path: Path, cache_dir: Path) -> Path:
    """Return the folder made of a GGUF file, and keep it as long as this process lives. Raises ModelError."""
    from engine.checkpoints.gguf.convert import convert  # noqa: PLC0415 - imports libraries only for converting
    from engine.checkpoints.gguf.file import GgufFile  # noqa: PLC0415

    found = known_gguf(path, cache_dir)
    if found is not None and _use(found):
        return found
    file = GgufFile(path)
    log.info("reading %s to tell whether it has been converted before", path)
    folder, sources = cache_dir / f"{stem_of(path)}-{_digest(file.paths)}", _facts(file.paths)

    def make(made: Path, progress: "Progress") -> None:
        convert(file, made, progress)
        _write_record(made, sources)

    for _ in range(2):  # another process may remove it before it is in use
        if not folder.is_dir():
            make_room(cache_dir, 2 * file.weights)
        converted(folder, str(path), make)
        if _use(folder, sources):
            return folder
    raise ModelError(f"{folder} is removed again and again by another process; set CACHE_DIR to a folder of your own")


def known_gguf(path: Path, cache_dir: Path) -> Path | None:
    """Return the folder made of a GGUF file, found without reading the file, or None if there is no record of it.
    Raises EngineFailure if a part of a split model is missing.
    """
    facts = _facts(parts_of(path))
    return next((each.folder for each in conversions(cache_dir) if each.sources == facts), None)


def conversions(cache_dir: Path) -> Iterator[Conversion]:
    """Yield the folders made of GGUF files of this version."""
    for record in sorted(cache_dir.glob(f"[!.]*/{_RECORD}")):
        try:
            content = json.loads(record.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # being written, or removed
            continue
        if content["format"] == FORMAT:
            yield Conversion(record.parent, content["sources"])


def source_of(folder: Path) -> Path | None:
    """Return the GGUF file that a folder was made of, or the first one of a split model. Return None if the folder was
    made of something else, or if the file has been removed or changed.
    """
    made = next((each for each in conversions(folder.parent) if each.folder == folder), None)
    return None if made is None or _is_stale(made) else made.source


def make_room(cache_dir: Path, needed: int) -> None:
    """Remove unused folders: those that are out of date, then others until `needed` bytes are free. Raises ModelError
    if that is not enough."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    others = sorted(conversions(cache_dir), key=_last_used)
    for stale in [True, False]:
        for each in others:
            full = shutil.disk_usage(cache_dir).free < needed + _SPARE
            if each.folder.is_dir() and (_is_stale(each) if stale else full):
                _remove(each.folder)
    free = shutil.disk_usage(cache_dir).free
    if free < needed + _SPARE:
        raise ModelError(
            f"the converted model takes {size_text(needed)}, and {cache_dir} has {size_text(max(0, free - _SPARE))} "
            "left for it: make room there, or set CACHE_DIR to a folder on another disk"
        )


def _last_used(conversion: Conversion) -> float:
    try:
        return (conversion.folder / _RECORD).stat().st_mtime
    except FileNotFoundError:  # another process has just removed it
        return 0.0


def _is_stale(conversion: Conversion) -> bool:
    try:
        return _facts([Path(source[0]) for source in conversion.sources]) != conversion.sources
    except OSError:
        return True


def _remove(folder: Path) -> None:
    """Remove a folder unless a process uses it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = folder.with_name(f".{folder.name}.removed")
        folder.rename(gone)  # at once, so that nobody finds half of it
        shutil.rmtree(gone, ignore_errors=True)
        log.info("removed the conversion %s, to make room", folder)
    except OSError:  # in use, or already removed
        pass
    finally:
        os.close(handle)


def _use(folder: Path, sources: list[list[Any]] | None = None) -> bool:
    """Lock a folder as long as this process lives, and write its record if `sources` are given. False if the folder has
    been removed."""
    record = folder / _RECORD
    with suppress(FileNotFoundError):
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_SH)
        if known := _used.pop(folder, None):
            os.close(known)
        _used[folder] = handle
        with suppress(OSError):  # a cache that is only read
            if sources is not None:
                _write_record(folder, sources)
            os.utime(record)
        return folder.stat().st_ino == os.fstat(handle).st_ino
    return False


def _write_record(folder: Path, sources: list[list[Any]]) -> None:
    written = folder / f"{_RECORD}.{os.getpid()}"
    written.write_text(json.dumps({"format": FORMAT, "sources": sources}), encoding="utf-8")
    written.replace(folder / _RECORD)


def _facts(paths: list[Path]) -> list[list[Any]]:
    stats = [(path.resolve(), path.stat()) for path in paths]
    return [[str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in stats]


def _digest(paths: list[Path]) -> str:
    digest = blake3(bytes([FORMAT]), max_threads=blake3.AUTO)
    for path in paths:
        digest.update_mmap(path)
    return digest.hexdigest(6)


def _convert(folder: Path, what: str, make: "Callable[[Path, Progress], None]") -> None:
    """Convert under the lock, and check the result."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415

    from engine.checkpoints.facts import read_model_facts  # noqa: PLC0415
    from engine.checkpoints.headers import check_headers, read_headers  # noqa: PLC0415

    log.info("converting %s into %s, once; that takes seconds, or minutes for billions of weights", what, folder)
    made = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    try:
        with tqdm(
            desc=f"Converting {Path(what).name}", unit="B", unit_scale=True, disable=None
        ) as bar:  # none in a file

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            make(made, progress)
        if not (made / INDEX).is_file():
            facts = read_model_facts(made)
            facts.check()
            check_headers(facts, read_headers(made))
        os.replace(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock, which the system releases even if the process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that converts the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
