"""FlashInfer's kernels in the background, with a package in its place that compiles when it is told to."""

import logging
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine.embedded.models.cuda.flashinfer_kernels import FlashInferKernels
from engine.embedded.models.devices import UnsupportedModelError


class Package:
    """Stands in for FlashInfer. `compile` lets a compilation end."""

    def __init__(self) -> None:
        self.compiled = False
        self.compile = threading.Event()
        self.error: Exception | None = None
        self.loaded: list[tuple[Any, ...]] = []

    def gen(self, *kernel: Any) -> SimpleNamespace:
        return SimpleNamespace(is_compiled=self.compiled)

    def get(self, *kernel: Any) -> None:
        if not self.compiled:
            assert self.compile.wait(10)
        if self.error:
            raise self.error
        self.loaded.append(kernel)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    fake = Package()
    for name, contents in {
        "flashinfer": {},
        "flashinfer.jit": {"gen_batch_prefill_module": fake.gen},
        "flashinfer.prefill": {"get_batch_prefill_module": fake.get},
        "flashinfer.utils": {"determine_attention_backend": lambda *arguments: f"for {arguments[-1]}"},
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    yield fake
    fake.compile.set()


def kernels(cache_dtype: torch.dtype = torch.bfloat16) -> FlashInferKernels:
    return FlashInferKernels(torch.device("cpu"), torch.bfloat16, cache_dtype, 128)


def test_compiled_kernels_are_there_soon(package: Package) -> None:
    package.compiled = True
    found = kernels()
    assert found.soon()
    found.wait()
    assert found.ready
    assert [kernel[0] for kernel in package.loaded] == ["for torch.bfloat16"]


def test_others_come_later(package: Package) -> None:
    found = kernels(torch.float8_e4m3fn)
    assert not found.soon()
    assert not found.ready
    package.compile.set()
    found.wait()
    assert found.ready
    assert [kernel[0] for kernel in package.loaded] == ["for torch.bfloat16", "for torch.float8_e4m3fn"]


def test_without_a_compiler_they_never_come(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    package.error = RuntimeError("no nvcc")
    found = kernels()
    assert not found.soon()
    with caplog.at_level(logging.WARNING):
        package.compile.set()
        with pytest.raises(UnsupportedModelError, match="no nvcc"):
            found.wait()
    assert not found.ready
    assert "small steps" in caplog.text


def test_without_the_package_the_fast_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.embedded.models.cuda.flashinfer_kernels.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="flashinfer"):
        kernels()
