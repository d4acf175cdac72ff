"""The GPU's code without a GPU.

Triton's interpreter runs the kernels; `tests.support.fake_flashinfer`, eager steps and a few lines do the rest. Modules
that import this are skipped where Triton is not installed.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import fake_flashinfer
from tests.support.weights import vary

ON_GPU = torch.cuda.is_available()
triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")  # which the interpreter looks for beside every kernel

from engine.embedded import loaded_model  # noqa: E402
from engine.embedded.models import heads  # noqa: E402
from engine.embedded.models.cuda import (  # noqa: E402
    compressed,
    decode_attention,
    fp8_kernels,
    group_attention,
    head_kernels,
    kernels,
    products,
    sampling_kernels,
    step_kernels,
)
from engine.embedded.sampling import sampler  # noqa: E402

FP8 = torch.float8_e4m3fn
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_num_tokens": 24, "max_batch_size": 4, "kv_block_size": 4,
    "num_blocks": 40,
    "overlap_scheduler": "on",
}  # fmt: skip


def save(path: Path, spread: float, *, tied: bool = False, kind: str = "llama") -> Path:
    config = AutoConfig.for_model(
        kind, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=64, vocab_size=64, max_position_embeddings=32, initializer_range=spread,
        tie_word_embeddings=tied, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    vary(model)
    model.save_pretrained(path)
    return path


def _to_fp8(values: Any) -> Any:
    """The interpreter's own conversion to eight bits forgets to carry into the exponent."""
    return torch.from_numpy(values).float().to(FP8).view(torch.uint8).numpy()


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, **_: Any
) -> torch.Tensor:
    """In the place of `torch._scaled_mm`: whether that takes a scale for each row depends on the CPU (AMX does not)."""
    return a.float() @ b.float() * scale_a * scale_b


@triton.jit
def _converted(pairs, odd: tl.constexpr):  # type: ignore[no-untyped-def]
    return (pairs >> 8 if odd else pairs).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _joined(low, high, last: tl.constexpr):  # type: ignore[no-untyped-def]
    low, high = (low >> 16, high >> 16) if last else (low, high)
    return (low & 0xFF) | ((high & 0xFF) << 8) | ((low & 0xFF00) << 8) | ((high & 0xFF00) << 16)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run kernels here, without a GPU, one program after the other.

    There is nothing to wait for. For every call of a function the interpreter changes Triton's language, which takes
    longer than most functions: here it does so once.

    A program that is given an empty tensor reads or writes the memory around it, which makes only some kernels fail. No
    tensor may be empty.
    """
    if ON_GPU:
        yield
        return
    from triton.runtime import interpreter  # noqa: PLC0415

    convert, call = interpreter._convert_float, interpreter.GridExecutor.__call__

    def run(executor: Any, *args: Any, launch_pdl: bool = True, **options: Any) -> None:
        empty = any(isinstance(arg, torch.Tensor) and not arg.numel() for arg in args)
        assert not empty or 0 in executor.grid, f"{executor.fn.__name__} is given nothing"
        call(executor, *args, **options)

    monkeypatch.setattr(
        interpreter, "_convert_float", lambda *a: _to_fp8(a[0]) if a[2] == tl.float8e4nv else convert(*a)
    )
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run)
    monkeypatch.setattr(torch, "_scaled_mm", _scaled_mm)
    for module in (
        compressed, decode_attention, fp8_kernels, group_attention, head_kernels, kernels, products, sampling_kernels,
        step_kernels,
    ):  # fmt: skip
        monkeypatch.setattr(module, "gdc_wait", lambda: None)
        monkeypatch.setattr(module, "gdc_launch_dependents", lambda: None)
    # What the interpreter knows no instructions for.
    monkeypatch.setattr(decode_attention, "_converted", _converted)
    monkeypatch.setattr(compressed, "_joined", _joined)
    changed = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    monkeypatch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
    # NumPy 2.4 converts no array of one element to a number, which the interpreter of Triton 3.6 asks for.
    monkeypatch.setattr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    yield
    changed.restore()


class FixedMask:
    """A matcher that allows the same ids for every token."""

    error = ""
    shared = None

    def __init__(self, ids: set[int]) -> None:
        self._ids = ids

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        bits = torch.zeros(bitmask.shape[1] * 32, dtype=torch.int64)
        bits[list(self._ids)] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
        bitmask[row] = torch.where(words >= 1 << 31, words - (1 << 32), words).int()

    def allows(self, token_id: int) -> bool:
        return token_id in self._ids

    def accept(self, token_id: int) -> bool:
        return token_id in self._ids


class _Replayed:
    """In the place of a CUDA graph: computes again, into the same memory."""

    def __init__(self, compute: Callable[[], tuple[torch.Tensor | None, ...] | None]) -> None:
        """`compute` returns nothing if it writes to memory of its own."""
        self._compute = compute
        self.outputs = compute() or ()

    @torch.inference_mode()
    def replay(self) -> None:
        for held, new in zip(self.outputs, self._compute() or (), strict=True):
            if held is not None:  # hidden states, of which most models keep none
                assert new is not None
                held.copy_(new)

    def pool(self) -> None:
        pass


def _capture(
    compute: Callable[[], tuple[torch.Tensor | None, ...] | None], pool: None
) -> tuple[_Replayed, tuple[torch.Tensor | None, ...]]:
    """In the place of `engine.embedded.models.cuda.graphs.capture`."""
    graph = _Replayed(compute)
    return graph, graph.outputs


@pytest.fixture
def cuda_runner(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import `engine.embedded.models.cuda.runner` on a CPU; every core loads its runner.

    All values are float32, also the results of fast products of eight bits.
    """
    assert not ON_GPU
    from engine.embedded.models.cuda import attention, graph_sizes, head, rounds, runner  # noqa: PLC0415

    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(runner, "FlashInferKernels", fake_flashinfer.Kernels)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(attention, "_WORKSPACE_BYTES", 0)
    # A graph for a step of every size would leave nothing to the others.
    monkeypatch.setattr(graph_sizes, "SHORT_PROMPT", 0)
    monkeypatch.setattr(graph_sizes, "LAUNCH_SECONDS", 0.0)
    # As many as are worth dividing a sequence for when they run in turn.
    monkeypatch.setattr(decode_attention, "_PROGRAMS", 4)
    monkeypatch.setattr(decode_attention, "_LONG_PROGRAMS", 8)
    monkeypatch.setattr(group_attention, "PROGRAMS", 4)
    # A start of a head runs kernels for every number of positions.
    monkeypatch.setattr(heads, "MOST_READ", 8)
    monkeypatch.setattr(heads, "_LEAST_READ", 3)
    monkeypatch.setattr(runner, "dtype_of", lambda *_: torch.bfloat16)  # of the model's check alone
    for module in (runner, head, rounds):
        monkeypatch.setattr(module, "capture", _capture)
        monkeypatch.setattr(module, "warn_of_compilation", lambda: None)
    for module in (runner, head):
        monkeypatch.setattr(module, "compile_first", lambda _: None)  # nothing is compiled here
    monkeypatch.setattr(
        sampler, "to_host", torch.clone
    )  # from the device that is a copy: the next step may write where these are
    monkeypatch.setattr(loaded_model, "load_runner", runner.CudaRunner)
    return runner
