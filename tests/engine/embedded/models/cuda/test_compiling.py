"""When Triton compiles, with a driver that runs nothing: no GPU is needed."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from engine.embedded.models.cuda.compiling import compile_together, warn_of_compilation  # noqa: E402
from tests.support.cuda import ON_GPU  # noqa: E402

pytestmark = pytest.mark.skipif(ON_GPU, reason="the driver is a stand-in")


def _copy(x, out, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.arange(0, SIZE)
    tl.store(out + place, tl.load(x + place, place < count, 0.0), place < count)


class Driver:
    """An H200 on which kernels do nothing."""

    def __init__(self) -> None:
        self.loaded = 0
        self.launched = 0
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        self.loaded += 1
        return 1, 2, 30, 0, 1024

    def launcher_cls(self, *_: Any) -> Any:
        def launch(*_: Any) -> None:
            self.launched += 1

        return launch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Driver]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    found = Driver()
    monkeypatch.setattr(driver, "_active", found)
    yield found
    triton.knobs.runtime.jit_post_compile_hook = None


def test_what_is_compiled_together_is_not_compiled_again(gpu: Driver, caplog: pytest.LogCaptureFixture) -> None:
    kernel = JITFunction(_copy)

    def compute(*sizes: int) -> None:
        for size in sizes:
            kernel[(1,)](torch.zeros(64), torch.zeros(64), 7, size)

    compile_together(lambda: compute(16, 32, 32, 16))
    assert (gpu.loaded, gpu.launched) == (2, 0)
    warn_of_compilation()
    compute(16, 32)
    assert (gpu.loaded, gpu.launched) == (2, 2) and not caplog.records
    compute(64)
    assert "waited for kernel" in caplog.text and "_copy" in caplog.text


def test_a_kernel_that_cannot_be_compiled_is_left_to_its_launch(gpu: Driver, caplog: pytest.LogCaptureFixture) -> None:
    kernel = JITFunction(_copy)
    with caplog.at_level(logging.WARNING):
        compile_together(lambda: kernel[(1,)](torch.zeros(64), torch.zeros(64), 7, 48))  # no power of two
    assert "one after the other" in caplog.text
    with pytest.raises(triton.CompilationError):
        kernel[(1,)](torch.zeros(64), torch.zeros(64), 7, 48)
