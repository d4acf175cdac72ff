"""When Triton compiles, with a driver that runs nothing: no GPU is needed."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from engine.embedded.models.cuda.compiling import (  # noqa: E402
    compile_first,
    expect_compilation,
    is_bare,
    warn_of_compilation,
)
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
    expect_compilation()


def test_a_late_compilation_is_told(gpu: Driver, caplog: pytest.LogCaptureFixture) -> None:
    kernel = JITFunction(_copy)

    def compute(size: int) -> None:
        kernel[(1,)](torch.zeros(64), torch.zeros(64), 7, size)

    compute(16)
    warn_of_compilation()
    compute(16)
    assert gpu.loaded == 1 and not caplog.records
    compute(64)
    assert "waited for kernel" in caplog.text and "_copy" in caplog.text
    caplog.clear()
    expect_compilation()
    compute(32)
    assert gpu.launched == 4 and not caplog.records


def test_kernels_are_compiled_side_by_side_and_not_run(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = JITFunction(_copy)
    compiling, together = threading.Barrier(2), JITFunction.run

    def compute(size: int) -> None:
        kernel[(1,)](torch.zeros(64), torch.zeros(64), 7, size)

    def compile_both(*arguments: Any, **options: Any) -> Any:
        compiling.wait(30)  # until there are two
        return triton.compile(*arguments, **options)

    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    kernel.device_caches[0]  # makes the compiler an attribute
    monkeypatch.setattr(kernel, "compile", compile_both)
    compile_first(lambda: [compute(size) for size in (16, 32, 16)])
    assert gpu.launched == 0 and JITFunction.run is together
    monkeypatch.setattr(kernel, "compile", None)
    compute(16)
    compute(32)
    assert gpu.launched == 2


def test_a_machine_is_bare_until_something_is_in_tritons_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert is_bare()
    (tmp_path / "cache").mkdir()
    assert is_bare()
    (tmp_path / "cache" / "kernel").mkdir()
    assert not is_bare()
