"""The heads that come with this server."""

import json

import pytest
from safetensors import safe_open

from engine.checkpoints.packaged import HEADS, packaged_head


@pytest.mark.parametrize("model", HEADS)
def test_a_head_has_the_weights_of_its_configuration(model: str) -> None:
    folder = packaged_head(model)
    config = json.loads((folder / "config.json").read_text())
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    shapes = {
        "fc.weight": [hidden, 3 * hidden],
        "midlayer.self_attn.q_proj.weight": [heads * dim, 2 * hidden],
        "midlayer.mlp.down_proj.weight": [hidden, config["intermediate_size"]],
        "d2t": [config["draft_vocab_size"]],
        "t2d": [config["vocab_size"]],
    }
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {name: file.get_slice(name).get_shape() for name in shapes} == shapes
        drafted = [place + offset for place, offset in enumerate(file.get_tensor("d2t").tolist())]
        assert file.get_tensor("t2d").nonzero().flatten().tolist() == drafted
    results = json.loads((folder / "results.json").read_text())
    assert len(results["accepted, greedy"]) == 4
