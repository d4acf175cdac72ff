import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EmbeddedConfig
from engine.embedded.models.checkpoint import read_config
from engine.embedded.models.cuda.graph_sizes import GraphSizes

LLAMA_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
QWEN_1_5B = {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960}
LLAMA_70B = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}


def sizes_of(folder: Path, shape: dict[str, int], **options: Any) -> GraphSizes:
    common = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps(common | {"max_position_embeddings": 4096} | shape))
    options = {"max_num_tokens": 4352, "max_batch_size": 64} | options
    return GraphSizes(EmbeddedConfig(model=str(folder), **options), read_config(folder))


@pytest.mark.parametrize(
    ("shape", "options", "largest"),
    [
        pytest.param(LLAMA_8B, {}, 640, id="8B"),
        pytest.param(LLAMA_8B, {"quantization": "fp8"}, 1344, id="8B in eight bits: twice as fast"),
        pytest.param(QWEN_1_5B, {}, 2048, id="1.5B"),
        pytest.param(QWEN_1_5B, {"max_num_tokens": 1000}, 1000, id="no step is larger"),
        pytest.param(QWEN_1_5B, {"max_num_tokens": 100}, 100, id="nor than a batch"),
        pytest.param(LLAMA_70B, {}, 256, id="70B: computing takes longer than launching"),
    ],
)
def test_prompts_have_graphs_while_launching_takes_longer_than_computing(
    tmp_path: Path, shape: dict[str, int], options: dict[str, Any], largest: int
) -> None:
    sizes = sizes_of(tmp_path, shape, **options)
    assert sizes.chunks[-1] == largest
    assert sizes.beside == [size for size in sizes.chunks if size >= 128]
    assert sizes.chunks == sorted(set(sizes.chunks)) and sizes.decodes[-1] == min(largest, 256)


def test_large_graphs_compute_the_logits_of_few_rows(tmp_path: Path) -> None:
    plain = sizes_of(tmp_path, QWEN_1_5B)
    assert [plain.rows(size) for size in (1, 64, 256, 320, 2048)] == [1, 64, 256, 64, 64]
    drafted = sizes_of(tmp_path, QWEN_1_5B, speculative="ngram")
    assert [drafted.rows(size) for size in (256, 320, 2048)] == [256, 320, 1024], "drafted tokens need theirs"
    small = sizes_of(tmp_path, QWEN_1_5B, max_batch_size=2, max_num_tokens=384)
    assert (small.most_rows, drafted.most_rows) == (256, 1024)
