"""FlashInfer's kernels in the background, with a package and a `ninja` in their place."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.embedded.models.cuda.flashinfer_kernels import FlashInferKernels
from engine.embedded.models.devices import UnsupportedModelError

NINJA = """#!/bin/sh
cd "$2"
case "$*" in *-n) test -f done && echo "ninja: no work to do." || echo "[1/1] nvcc"; exit ;; esac
setsid sleep 60 &  # ninja's compilers are not in its process group, and end when it is told to
trap "kill $!; wait $!; exit 2" TERM
echo $$ $! > compiler
while ! test -f go; do sleep 0.02; done
kill $!
echo "nvcc: $(cat go)"
test "$(cat go)" = right && touch done
"""


BFLOAT16, FLOAT8 = "torch.bfloat16_causal", "torch.float8_e4m3fn_causal"
SOURCES = [f"paged_kernel_mask_{mask}.cu" for mask in range(4)] + ["binding.cu"]


class Spec:
    """A library to compile, as FlashInfer describes it."""

    def __init__(self, package: "Package", name: str) -> None:
        self._package = package
        self.name = name
        self.sources = [Path(source) for source in SOURCES]
        self.extra_ldflags: list[str] | None = None
        self.is_aot = package.is_aot

    @property
    def build_dir(self) -> Path:
        return self._package.folder(self.name)

    @property
    def lock_path(self) -> Path:
        return self.build_dir / "lock"

    @property
    def ninja_path(self) -> Path:
        return self.build_dir / "build.ninja"

    def write_ninja(self) -> None:
        if self.name == self._package.broken:
            self._package.compilers(BFLOAT16)
            raise OSError("no space left")
        self.ninja_path.write_text("\n".join(map(str, [*self.sources, *(self.extra_ldflags or ())])))


class Package:
    """Stands in for FlashInfer. Compilers wait until `go` says how they end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.prefill = ModuleType("flashinfer.prefill")
        self.prefill.gen_batch_prefill_module = self.gen  # type: ignore[attr-defined]
        self.prefill.get_batch_prefill_module = self.get  # type: ignore[attr-defined]
        self.loaded: list[str] = []
        self.broken = ""
        """A library that cannot be written, when another one is being compiled."""
        self.at_once = False
        """Whether the linker looks for all functions of a library when it is loaded."""
        self.is_aot = False

    def folder(self, name: str) -> Path:
        found = self._folder / name
        found.mkdir(exist_ok=True)
        return found

    def compilers(self, name: str) -> list[int]:
        """Wait until a library is being compiled; return the processes that do it."""
        told = self.folder(name) / "compiler"
        wait_for(lambda: told.exists() and bool(told.read_text().strip()))
        return [int(process) for process in told.read_text().split()]

    def go(self, name: str, how: str) -> None:
        (self.folder(name) / "part").write_text(how)
        (self.folder(name) / "part").rename(self.folder(name) / "go")

    def gen(self, backend: str, *_: Any) -> Spec:
        return Spec(self, backend)

    def get(self, *arguments: Any) -> None:
        spec = self.prefill.gen_batch_prefill_module(*arguments)
        assert self.is_aot or (spec.build_dir / "done").exists()
        if self.at_once and len(spec.sources) < len(SOURCES):
            raise OSError("undefined symbol: BatchPrefillWithPagedKVCacheDispatched")
        self.loaded.append(spec.name)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Package]:
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text(NINJA)
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", str(ninja.parent), prepend=os.pathsep)
    fake = Package(tmp_path)
    for name, contents in {
        "flashinfer": {},
        "flashinfer.jit": {"gen_batch_prefill_module": fake.gen},
        "flashinfer.utils": {"determine_attention_backend": lambda *arguments: str(arguments[-1])},
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", fake.prefill)
    yield fake
    for name in (BFLOAT16, FLOAT8):
        fake.go(name, "right")


def kernels(cache_dtype: torch.dtype = torch.bfloat16) -> FlashInferKernels:
    begun = FlashInferKernels(torch.device("cpu"), torch.bfloat16, cache_dtype, 128)
    begun.start()
    return begun


def assert_ended(processes: list[int]) -> None:
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_they_are_compiled_at_once_while_the_engine_goes_on(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = kernels(torch.float8_e4m3fn)
        for name in (BFLOAT16, FLOAT8):
            package.compilers(name)
        package.go(FLOAT8, "right")
        wait_for((package.folder(FLOAT8) / "done").exists)
        assert not found.ready
        package.go(BFLOAT16, "right")
        found.wait()
    assert found.ready
    assert package.loaded == [BFLOAT16, FLOAT8]
    assert "compiled after" in caplog.text


def test_only_the_causal_kernels_are_compiled(package: Package) -> None:
    package.go(BFLOAT16, "right")
    kernels().wait()
    spec = Spec(package, BFLOAT16)
    assert spec.ninja_path.read_text().split() == ["paged_kernel_mask_1.cu", "binding.cu", "-Wl,-z,lazy"]


def test_all_are_compiled_if_the_causal_ones_cannot_be_loaded_alone(package: Package) -> None:
    package.at_once = True
    for name in (BFLOAT16, FLOAT8, "torch.bfloat16", "torch.float8_e4m3fn"):
        package.go(name, "right")
    found = kernels(torch.float8_e4m3fn)
    found.wait()
    assert found.ready and package.loaded == ["torch.bfloat16", "torch.float8_e4m3fn"]


def test_a_compiler_ends_if_another_cannot_begin(package: Package) -> None:
    package.broken = FLOAT8
    found = kernels(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModelError, match="no space left"):
        found.wait()
    assert not (package.folder(BFLOAT16) / "done").exists()
    assert_ended(package.compilers(BFLOAT16))


def test_what_a_package_has_is_only_loaded(package: Package) -> None:
    package.is_aot = True
    found = kernels(torch.float8_e4m3fn)
    found.wait()
    assert found.ready and package.loaded == ["torch.bfloat16", "torch.float8_e4m3fn"]
    assert not (package.folder("torch.bfloat16") / "compiler").exists()


def test_what_is_compiled_is_only_loaded(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    (package.folder(BFLOAT16) / "done").touch()
    with caplog.at_level(logging.INFO):
        found = kernels()
        found.wait()
    assert found.ready and package.loaded == [BFLOAT16]
    assert not (package.folder(BFLOAT16) / "compiler").exists() and not caplog.records


def test_without_a_compiler_they_never_come(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    package.go(BFLOAT16, "no such header")
    with caplog.at_level(logging.WARNING):
        found = kernels()
        with pytest.raises(UnsupportedModelError, match="nvcc: no such header"):
            found.wait()
    assert not found.ready
    assert "small steps" in caplog.text


def test_compilers_end_with_the_engine(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    found = kernels(torch.float8_e4m3fn)
    processes = package.compilers(BFLOAT16) + package.compilers(FLOAT8)
    found.close()
    with pytest.raises(UnsupportedModelError):
        found.wait()
    assert_ended(processes)
    assert not caplog.records


def test_without_the_package_the_fast_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.embedded.models.cuda.flashinfer_kernels.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="flashinfer"):
        kernels()
