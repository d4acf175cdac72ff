"""Fixtures and options for all tests, and which tests are slow."""

import atexit
import functools
import gc
import importlib.util
import inspect
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import httpx
import hypothesis
import pytest

if TYPE_CHECKING:
    from engine.memory.service import MemoryService


def _has_home() -> bool:
    """Whether this user can keep files below the home folder."""
    try:
        (Path.home() / ".cache").mkdir(parents=True, exist_ok=True)
        return os.access(Path.home() / ".cache", os.W_OK)
    except (OSError, RuntimeError):
        return False


if not _has_home():
    os.environ["HOME"] = tempfile.mkdtemp(
        prefix="trellis-home-"
    )  # models are converted, and code is compiled, below it
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

# Most tests are about something else than the model's name, and ask without one.
os.environ.setdefault("MODEL_OPTIONAL", "true")
# Those about stored responses store them in folders of their own.
os.environ.setdefault("RESPONSES_STORE_MB", "0")
# A second engine process takes 2 s of processor time; tests about it ask for one.
os.environ.setdefault("ENGINE_STANDBY", "false")

# The suite's expected values are a CPU's: GPUs are hidden unless GPU tests are asked for, before torch looks for them.
# A worker of xdist inherits the decision.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("gpu" in argument for argument in sys.argv[1:]):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# `nohup` has SIGHUP ignored, and so would be every server that tests start: a handler is not inherited.
signal.signal(signal.SIGHUP, lambda *_: None)

# httpx gives a server five seconds to answer, which pass on a busy machine. This object has its defaults.
_patience = inspect.signature(httpx.get).parameters["timeout"].default
_patience.connect = _patience.read = _patience.write = _patience.pool = 60.0

# How long an example takes says more of what else runs here, and a new example must not stop an unrelated change:
# `--hypothesis-profile=default` looks for new ones.
hypothesis.settings.register_profile(
    "trellis", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("trellis")

if importlib.util.find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = (
            "1"  # for `tests.support.cuda`: Triton reads it when it is imported, which transformers does
        )


_PILLOWS_LIMIT = (1 << 30) // 4 // 3
"""`PIL.Image.MAX_IMAGE_PIXELS` where nobody has changed it."""
SLOW = (
    "benchmarks/",
    "deploy/",
    "e2e/",
    "engine/checkpoints/test_fuzz.py",
    "engine/test_conformance_handoff.py",
    "engine/test_conformance_images.py",
    "engine/embedded/grammar/test_grammar_worker.py",
    "engine/embedded/handoff/",
    "engine/embedded/models/cuda/",
    "engine/embedded/models/native/test_blocks.py",
    "engine/embedded/speculation/test_draft_model.py",
    "engine/embedded/test_images_requests.py",
    "engine/embedded/test_tiered_engine.py",
    "engine/embedded/test_windows.py",
    "engine/embedded/vision/",
    "engine/embedded/whisper/",
    "engine/kit/test_processors.py",
    "engine/process/test_child.py",
    "engine/replicas/test_encode_embedded.py",
    "engine/replicas/test_encode_upload.py",
    "engine/transfer/",
    "engine/trtllm/test_hosted_encoder.py",
    "engine/trtllm/test_probe_report.py",
    "engine/trtllm/test_probe_verdicts.py",
    "engine/trtllm/test_visual.py",
    "engine/trtllm/test_workers.py",
    "engine/visual/test_diffusers.py",
    "engine/visual/test_service.py",
    "multimodal/answers/parsers/test_matrix.py",
    "routers/test_responses_websocket.py",
    "routers/test_transcriptions.py",
    "routers/visual/test_router.py",
    "routers/visual/test_sdk.py",
    "routers/visual/test_videos.py",
    "server/commands/test_memory.py",
    "server/http/test_openapi_fuzz.py",
    "server/http/test_tracing_export.py",
    "server/process/",
    "smolaudio/",
    "smoldraw/test_model.py",
    "smolvideo/",
    "smolvision/",
)
"""Files and folders that `make test` leaves to `make test-slow`: what starts fleets of processes, breaks them,
measures, or repeats on more engines and models what a faster file asks of one."""
LONGEST = (
    "engine/trtllm/test_probe_verdicts.py",
    "engine/trtllm/test_workers.py",
    "e2e/",
    "engine/checkpoints/test_fuzz.py",
    "engine/embedded/test_smollm2_tokens.py",
    "engine/embedded/vision/test_encoder.py",
    "deploy/",
    "server/process/",
    "smolaudio/",
    "smoldraw/test_model.py",
    "smolvideo/",
    "smolvision/",
    "benchmarks/",
)
"""What runs first, so that no process works on a long file while the other has nothing left to do."""
TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what `make test` or `make test-slow` leaves out anyway, unless it is named."""
    if config.option.markexpr not in ("slow", "not slow") or not collection_path.is_relative_to(TESTS):
        return None
    place = collection_path.relative_to(TESTS).as_posix() + ("/" if collection_path.is_dir() else "")
    if config.option.markexpr == "not slow":
        return place.startswith(SLOW) or None
    if collection_path.is_dir() or place.startswith(SLOW):
        return None
    return not _slow_marks().search(collection_path.read_text()) or None


@functools.cache
def _slow_marks() -> re.Pattern[str]:
    """Return a pattern for files with slow tests: they contain the mark, or import a support module that does."""
    support = (path for path in sorted((TESTS / "support").glob("*.py")) if "mark.slow" in path.read_text())
    return re.compile("|".join([r"mark\.slow", *(rf"support\.{path.stem} import" for path in support)]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector: imports make a million objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # walking them would take 0.3 s
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _place(item).startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not _place(item).startswith(LONGEST))


def _place(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix()


def pytest_report_header() -> str:
    from engine.embedded.models.native.levels import LEVELS, available  # noqa: PLC0415 - what it imports is measured by other tests

    here = {level.name for level in available()}
    return "compiled path: " + ", ".join(
        level.name if level.name in here else f"{level.name} (emulated)" for level in LEVELS
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama with random weights: 3 layers, vocabulary 384, context 512, end of sequence 2, no tokenizer."""
    import torch  # noqa: PLC0415 - most tests do without
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    folder = tmp_path_factory.mktemp("tiny_model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def few_certificates(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trust a single certificate authority.

    No test talks to the world, and reading the full list takes 50 ms of CPU for each client and each server.
    """
    first, end, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(first + end)
    os.environ["SSL_CERT_FILE"] = str(path)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """For torch: tiny matrices gain nothing from two threads, which wait for each other on a busy machine."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def pillows_limit() -> Iterator[None]:
    """Restore Pillow's limit of pixels, which an image encoder changes for the whole process."""
    yield
    if (pillow := sys.modules.get("PIL.Image")) is not None:
        pillow.MAX_IMAGE_PIXELS = _PILLOWS_LIMIT


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the default model, converted into the user's cache on first use."""
    from engine.checkpoints.store import resolve_model  # noqa: PLC0415 - most tests do without
    from server.settings import Settings  # noqa: PLC0415

    settings = Settings()
    return resolve_model(settings.model, settings.cache_dir)


@pytest.fixture
async def memory_service(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator["MemoryService"]:
    """A memory service that runs; it keeps what no engine leases for the module's `MEMORY_GRACE_SECONDS`."""
    from engine.memory.service import GRACE_SECONDS, MemoryService  # noqa: PLC0415 - most tests do without

    grace = getattr(request.module, "MEMORY_GRACE_SECONDS", GRACE_SECONDS)
    service = MemoryService(tmp_path / "memory.sock", grace=grace)
    service.start()
    yield service
    service.close()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for Unix sockets: those of `tmp_path` are too long in a worker of xdist."""
    with tempfile.TemporaryDirectory(prefix="trellis-test-", dir="/tmp") as folder:
        yield Path(folder)
