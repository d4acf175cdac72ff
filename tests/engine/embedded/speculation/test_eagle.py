"""An EAGLE-3 head drafts for the model whose hidden states it reads."""

import gc
import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.checkpoints.eagle import read_eagle_head
from engine.checkpoints.facts import read_model_facts
from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.models.heads import HeadDraft, HeadStep, load_tensors
from engine.embedded.models.load import load_runner
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.embedded.speculation.eagle import Eagle, HeadReading
from engine.errors import EngineFailure
from engine.types import Delta, GenerateRequest, SamplingParams
from smoleagle.model import Head
from tests.engine.embedded.models.native.test_blocks import int8
from tests.support.steps import Part, step_of

HIDDEN, VOCAB, LAYERS, BLOCK, DEPTH = 64, 256, 6, 8, 4
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "vocab_size": VOCAB, "draft_vocab_size": 200,
}  # fmt: skip
PROMPTS = [[random.Random(seed).randrange(3, VOCAB) for _ in range(length)] for seed, length in enumerate((9, 70, 20))]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, eos_token_id=2, initializer_range=0.15,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    return answers(EngineCore(config_of(folder), lambda _: None))


@pytest.fixture(scope="module")
def sampled(folder: Path) -> list[list[int]]:
    return answers(EngineCore(config_of(folder), lambda _: None), temperature=1.0, seed=7)


def write(path: Path, tensors: dict[str, torch.Tensor], **changed: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file({name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()},
              path / "model.safetensors")  # fmt: skip
    (path / "config.json").write_text(json.dumps(CONFIG | changed))
    return path


@pytest.fixture(scope="module")
def head() -> Head:
    """A head of random weights, which bfloat16 holds."""
    torch.manual_seed(0)
    head = Head(CONFIG).requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape).mul(0.15).add(float(parameter.dim() == 1)).bfloat16())
    return head


@pytest.fixture(scope="module")
def drafted() -> torch.Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[: CONFIG["draft_vocab_size"]].sort().values


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory, head: Head, drafted: torch.Tensor) -> Path:
    """`head` without output rows of its own."""
    tensors = dict(head.state_dict()) | {"d2t": drafted - torch.arange(len(drafted))}
    return write(tmp_path_factory.mktemp("head"), tensors)


@pytest.fixture(scope="module")
def repeater(tmp_path_factory: pytest.TempPathFactory, head: Head, model: LlamaForCausalLM) -> Path:
    """A head that says the token before the last one again, as `model` often does: what enters layer 0 is all that
    it looks at. Its names are those of speculators."""
    tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in head.state_dict().items()}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"] = torch.zeros_like(tensors[f"layers.0.{name}.weight"])
    tensors["fc.weight"] = torch.eye(HIDDEN, 3 * HIDDEN)
    tensors["norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=1)
    changed = {"draft_vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": [0, 3, 5]}
    return write(tmp_path_factory.mktemp("repeater"), tensors, **changed)


def config_of(folder: Path, **options: Any) -> EmbeddedConfig:
    fixed = {"dtype": "float32", "threads": 1, "num_blocks": 100, "kv_block_size": BLOCK, "max_batch_size": 4}
    return EmbeddedConfig(model=str(folder), **{**fixed, **options})


def add(core: EngineCore, name: str, prompt: list[int], **sampling: Any) -> None:
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **sampling})
    request = GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=params)
    state = SamplerState(params, prompt, (2,), params.seed or 0, None, VOCAB, torch.device("cpu"))
    core.add(Sequence(request=request, sampler=state, rank=0.0, arrival=0.0, tokens=list(prompt)))


def answers(core: EngineCore, **sampling: Any) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        add(core, str(index), prompt, **sampling)
    with torch.inference_mode():
        while core.busy:
            for name, delta in core.step():
                assert isinstance(delta, Delta), delta
                found[int(name)] += delta.token_ids
    return found


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_head_computes_what_it_was_trained_to(
    folder: Path, head_folder: Path, head: Head, drafted: torch.Tensor, model: LlamaForCausalLM, attention: str
) -> None:
    """Positions in chunks beside another sequence, then a draft that leaves the sequence's blocks. Compiled code rounds
    weights to 8 bits."""
    output = model.get_output_embeddings().weight[drafted]
    if attention == "auto":
        head, output = deepcopy(head), int8(output)
        for weight in head.parameters():
            weight.copy_(int8(weight) if weight.dim() == 2 else weight)
    asked = {"speculative": "eagle3", "speculative_model": str(head_folder)}
    runner = load_runner(config_of(folder, attention=attention, **asked))
    read = read_eagle_head(head_folder, read_model_facts(folder))
    loaded = runner.load_head(read, spare_blocks=4)
    tokens, table, start = PROMPTS[1][:30], [3, 1, 2, 5], 22
    runner.forward(step_of([Part(tokens, table, 0, len(tokens))]))
    assert runner.hidden is not None
    entered = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    features = torch.cat([entered[layer][0] for layer in (2, 3, 3)], -1)
    torch.testing.assert_close(runner.hidden, features, rtol=1e-3, atol=1e-3)

    text, probabilities = list(tokens), list[float]()
    for depth in range(DEPTH):
        final = head(features[None], torch.tensor([text]), model.model.embed_tokens.weight, DEPTH)[depth]
        logits = (final[0, start] @ output.T).softmax(0)
        text[start + 2 + depth] = int(drafted[logits.argmax()])
        probabilities.append(float(logits.max()))
    for first, last in ((0, 13), (13, start + 1)):
        beside, found = loaded.draft(
            HeadStep(
                [7, *tokens[first + 1 : last + 1]], [0, *range(first, last)], [0, first], [1, last - first],
                [[6, 101], [*table[:3], 100]], torch.cat((features[:1], features[first:last])),
            ),
            [3, DEPTH if last > start else 0],
            0.0,
        )  # fmt: skip
        assert len(beside.tokens) == len(beside.probabilities) == 3
        assert len(found.tokens) == (DEPTH if last > start else 0)
    assert found.tokens == text[start + 2 : start + 2 + DEPTH]
    assert found.probabilities == pytest.approx(probabilities, abs=1e-3)


def test_many_sequences_are_drafted_for_as_each_is_alone(folder: Path, head_folder: Path) -> None:
    """Compiled code, with more rows of logits than those that share memory."""
    count = 70
    runner = load_runner(config_of(folder, speculative="eagle3", speculative_model=str(head_folder), num_blocks=count))
    loaded = runner.load_head(read_eagle_head(head_folder, read_model_facts(folder)), spare_blocks=0)
    features = torch.randn((count, 3 * HIDDEN), generator=torch.Generator().manual_seed(4))
    tokens, tables, limits = [index % VOCAB for index in range(count)], [[index] for index in range(count)], [1, 3] * 35
    found = loaded.draft(HeadStep(tokens, [0] * count, [0] * count, [1] * count, tables, features), limits, 0.0)
    assert [len(draft.tokens) for draft in found] == limits
    for index in range(count):
        step = HeadStep([tokens[index]], [0], [0], [1], [tables[index]], features[index : index + 1])
        assert loaded.draft(step, [limits[index]], 0.0) == [found[index]]


def test_scaled_positions_are_turned_alike_by_compiled_code_and_by_torch(
    folder: Path, head: Head, drafted: torch.Tensor, tmp_path: Path
) -> None:
    """Positions are read, and further ones drafted. Compiled code's 8 bits do not change these weights."""
    stored = head.state_dict().items()
    tensors = {name: int8(tensor).contiguous() if tensor.dim() == 2 else tensor for name, tensor in stored}
    output = torch.randn((len(drafted), HIDDEN), generator=torch.Generator().manual_seed(2))
    save_file(tensors | {"d2t": drafted - torch.arange(len(drafted)), "lm_head.weight": int8(output)},
              tmp_path / "model.safetensors")  # fmt: skip
    features = torch.randn((20, 3 * HIDDEN), generator=torch.Generator().manual_seed(3))
    step = HeadStep(PROMPTS[1][:20], list(range(40, 60)), [0], [20], [[1, 2, 3, 4]], features)
    found = []
    for scaling in ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, None):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": scaling}))
        for attention in ("auto", "sdpa"):
            asked = {"speculative": "eagle3", "speculative_model": str(tmp_path), "attention": attention}
            asked["cpu_isa"] = "portable"  # others may round activations to 8 bits
            loaded = load_runner(config_of(folder, **asked)).load_head(
                read_eagle_head(tmp_path, read_model_facts(folder)), spare_blocks=4
            )
            found += loaded.draft(step, [DEPTH], 0.0)
    (compiled, plain), (unscaled, _) = found[:2], found[2:]
    assert compiled.tokens == plain.tokens
    assert compiled.probabilities == pytest.approx(plain.probabilities, rel=1e-3)
    assert compiled.probabilities != pytest.approx(unscaled.probabilities, rel=1e-2)


@pytest.mark.parametrize("options", [{"num_blocks": 22}, {"attention": "sdpa", "overlap_scheduler": "on"}])
def test_a_head_changes_nothing(
    folder: Path,
    head_folder: Path,
    repeater: Path,
    plain: list[list[int]],
    sampled: list[list[int]],
    options: dict[str, Any],
) -> None:
    for path in (head_folder, repeater):
        asked = {"speculative": "eagle3", "speculative_model": str(path), "speculative_min_speedup": 0.0}
        asked["speculative_min_match"] = 1000  # nothing is looked up
        core = EngineCore(config_of(folder, speculative_tokens=DEPTH, **asked, **options), lambda _: None)
        assert answers(core) == plain
        assert answers(core, temperature=1.0, seed=7) == sampled
        stats = core.stats().spec_decoding_stats
        assert stats is not None and stats.num_drafts > 100
        assert (stats.num_accepted_tokens > 50) == (path is repeater)


@pytest.mark.parametrize("min_speedup", [0.0, 1000.0])
def test_sequences_that_have_ended_are_not_kept(folder: Path, head_folder: Path, min_speedup: float) -> None:
    """Their hidden states may be, while nothing is drafted."""
    asked = {"speculative": "eagle3", "speculative_model": str(head_folder), "speculative_min_speedup": min_speedup}
    core = EngineCore(config_of(folder, speculative_tokens=DEPTH, **asked), lambda _: None)
    answers(core)
    add(core, "aborted", PROMPTS[0])
    with torch.inference_mode():
        for _ in range(8):
            core.step()
    core.abort("aborted")
    gc.collect()
    assert not [kept for kept in gc.get_objects() if isinstance(kept, Sequence)]


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"hidden_size": 32}, r"hidden_size in .*config\.json is 32, and that of the model in .* is 64"),
        ({}, {"vocab_size": 300}, r"vocab_size in .*config\.json is 300, and that of the model in .* is 256"),
        ({}, {"draft_vocab_size": 150}, r"the tensor d2t in .*model\.safetensors has the shape \[200\]"),
        ({}, {"num_hidden_layers": 2}, r"num_hidden_layers in .*config\.json is 2"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 6]}, r"eagle_aux_hidden_state_layer_ids in .*: \[1, 6\]"),
        ({"fc.weight": None}, {}, r"the files in .* lack the tensor fc of an EAGLE-3 head"),
        ({"d2t": None}, {}, r"the files in .* lack the tensor d2t, which draft_vocab_size needs"),
        ({"fc.bias": torch.zeros(HIDDEN)}, {}, r"the tensor fc\.bias in .*model\.safetensors is unknown"),
        ({"norm.weight": torch.full((HIDDEN,), float("nan"))}, {}, r"the tensor norm\.weight in .* not finite"),
        ({"d2t": torch.full((200,), 100)}, {}, r"d2t in .*model\.safetensors names tokens that the model does not"),
    ],
)
def test_a_head_that_does_not_fit_stops_the_start(
    tmp_path: Path, folder: Path, head_folder: Path, tensors: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    stored = load_file(head_folder / "model.safetensors") | tensors
    path = write(tmp_path / "head", {name: tensor for name, tensor in stored.items() if tensor is not None}, **config)
    with pytest.raises(EngineFailure, match=message):
        load_tensors(read_eagle_head(path, read_model_facts(folder)))


def test_layers_are_counted_as_each_project_does(folder: Path, head_folder: Path, tmp_path: Path) -> None:
    """vLLM and speculators name layers by their input, SGLang by their output."""
    tensors, facts = load_file(head_folder / "model.safetensors"), read_model_facts(folder)
    for index, (changed, taken) in enumerate(
        [
            ({}, (2, 3, 3)),
            ({"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}, (0, 1, 5)),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}}, (1, 2, 5)),
            ({"transformer_layer_config": CONFIG, "hidden_size": 1, "norm_before_residual": True}, (2, 3, 3)),
        ]
    ):
        read = read_eagle_head(write(tmp_path / str(index), tensors, **changed), facts)
        assert (read.taken, read.norm_before_residual) == (taken, "norm_before_residual" in changed)


def test_hidden_states_that_wait_for_the_head_are_bounded() -> None:
    reader = HeadReading(1, 0, BLOCK)
    for start in range(0, 2000, 100):
        reader.keep(start, torch.arange(start, start + 100)[:, None])
    assert reader.end % BLOCK == 0 and reader.end > 1400 and reader.first == reader.end
    assert reader.take(3).flatten().tolist() == [reader.end - 3, reader.end - 2, reader.end - 1]
    end = reader.end
    reader.keep(1990, torch.tensor([[-1]]))  # what came after the right tokens of a draft
    assert reader.take(1990 - end + 1).flatten().tolist() == [*range(end, 1990), -1]
    reader.keep(3000, torch.tensor([[3000]]))
    assert (reader.first, reader.end, reader.count) == (3000, 3000, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_behind_a_gap_hidden_states_are_taken_from_the_next_block_on(dtype: torch.dtype) -> None:
    reader = HeadReading(1, 1, BLOCK)
    for start in range(1, BLOCK + 2):
        reader.keep(start, torch.tensor([[start]], dtype=dtype))
    assert (reader.first, reader.end, reader.count) == (BLOCK, BLOCK, 2)
    assert reader.take(2).flatten().tolist() == [BLOCK, BLOCK + 1]
    reader.keep(4 * BLOCK - 1, torch.tensor([[-1], [-2], [-3]], dtype=dtype))
    assert (reader.first, reader.take(2).flatten().tolist()) == (4 * BLOCK, [-2, -3])
    reader.keep(4 * BLOCK + 2, torch.tensor([[-4], [-5]], dtype=dtype))
    reader.drop()
    assert (reader.end, reader.count) == (4 * BLOCK + 2, 0)


def test_hidden_states_that_are_too_many_to_read_are_left_out() -> None:
    """From the beginning of a block on; those of rejected drafts behind what is known do not count."""
    reader = HeadReading(1, 0, BLOCK)
    reader.keep(0, torch.arange(5 * BLOCK)[:, None])
    reader.leave_out(5 * BLOCK - 2, 2 * BLOCK)
    assert (reader.first, reader.end, reader.count) == (3 * BLOCK, 3 * BLOCK, 2 * BLOCK)
    assert reader.take(2).flatten().tolist() == [3 * BLOCK, 3 * BLOCK + 1]
    reader.leave_out(5 * BLOCK, 1)
    assert (reader.first, reader.count) == (5 * BLOCK, 0)


def test_waiting_hidden_states_do_not_keep_whole_steps_in_memory() -> None:
    reader = HeadReading(1, 0, BLOCK)
    for start in range(400):
        step = torch.zeros(1000, 4)
        step[-1] = start
        reader.keep(start, step[-1:])
    held = sum(piece.untyped_storage().nbytes() for piece in reader.waiting)
    assert held <= 20 * step.nbytes, "not all 400 steps"
    assert reader.take(400)[:, 0].tolist() == [*range(400)]


def test_hidden_states_before_unread_steps_are_not_used(
    folder: Path, head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens 0 to 7 are read, of which 4 to 7 are drafts that prove wrong. Then some steps are not read."""
    given: list[list[float]] = []

    class Recorder:
        rounds = None

        def draft(self, step: HeadStep, limits: list[int], least: float) -> list[HeadDraft]:
            given.append(step.inputs[:, 0].tolist())
            return [HeadDraft([], []) for _ in limits]

    asked = config_of(folder, speculative="eagle3", speculative_model=str(head_folder))
    target = load_runner(asked)
    monkeypatch.setattr(target, "load_head", lambda *_: Recorder())
    eagle = Eagle(asked, target)
    params = SamplingParams(max_tokens=40)
    tokens = [*range(3, 3 + 2 * BLOCK + 3)]
    sequence = Sequence(
        request=GenerateRequest(request_id="a", prompt_token_ids=(3,), sampling=params),
        sampler=SamplerState(params, (3,), (2,), 0, None, VOCAB, torch.device("cpu")),
        rank=0.0, arrival=0.0, tokens=tokens, tables=[[0, 1, 2, 3]], slot=0, admission=1,
    )  # fmt: skip

    def read(start: int, end: int, offset: int) -> None:
        step: Any = SimpleNamespace(tokens=tokens[start:end], admissions=[1], starts=[start], lengths=[end - start])
        eagle.read(step, torch.arange(start + offset, end + offset, dtype=torch.float32)[:, None])

    read(0, 8, 0)
    eagle.skip()
    read(6, 2 * BLOCK + 2, 100)
    eagle.draft([sequence], [2])
    assert given == [[100.0 + position for position in range(BLOCK, 2 * BLOCK + 2)]]
