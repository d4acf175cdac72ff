"""When Triton compiles, with a driver that runs nothing: no GPU is needed."""

import os
import subprocess
import sys
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
ROOT = Path(__file__).resolve().parents[5]


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


def compiled_for_an_h200(code: str, cache: Path) -> list[str]:
    """Run code whose kernels are compiled for an H200, and not run; return what it prints, the numbers of kernels that
    were loaded and launched last.

    It runs without the interpreter, which takes what the compiler does not: a variable that changes its type.
    """
    before = """
import torch
from triton.runtime import driver
from tests.engine.embedded.models.cuda.test_compiling import Driver
torch.cuda.current_device = lambda: 0
driver._active = Driver()
"""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", f"{before}{code}print(driver.active.loaded, driver.active.launched)"],
        cwd=ROOT,
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.split()


def test_the_kernels_that_begin_a_step_compile_for_an_h200(tmp_path: Path) -> None:
    code = """
from engine.embedded.models.cuda import step_kernels
inputs = torch.zeros(4, 5, dtype=torch.int32)
step_kernels.embed(inputs[0], torch.zeros(3, dtype=torch.int64), torch.zeros(9, 576, dtype=torch.bfloat16))
for copy in (True, False):
    step_kernels.locate(inputs[2], inputs[1], torch.zeros(3, 70, dtype=torch.int32), 32, 64, copy=copy)
"""
    assert compiled_for_an_h200(code, tmp_path) == ["3", "3"]


def test_the_kernels_that_sample_compile_for_an_h200(tmp_path: Path) -> None:
    code = """
from engine.embedded.models.cuda.sampling_kernels import FIELDS, REPORT, Kernels
rows, vocab = 2, 5000
kernels = Kernels(rows, vocab, torch.device("cpu"))
logits, ends = torch.zeros(rows, vocab, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
tables = torch.zeros(3, FIELDS, dtype=torch.int32), torch.zeros(3, vocab), torch.zeros(3, vocab, dtype=torch.int32)
results = torch.zeros(rows, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(rows, REPORT)
inputs = torch.zeros(3, rows, dtype=torch.int64)
kernels(logits, tables, ends, results, rows=(inputs[0], inputs[1], inputs[2]))
masks = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32)
kernels(logits, tables, ends, results, guided=(torch.zeros(rows, 4, dtype=torch.int32), masks))
"""
    assert compiled_for_an_h200(code, tmp_path) == ["10", "10"]
