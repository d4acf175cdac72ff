"""Model files for the other servers in benchmarks: they have the same weights."""

from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize, quantize

from benchmarks.widen import widen


def test_a_widened_gguf_has_the_same_facts_and_its_weights_as_bfloat16(tmp_path: Path) -> None:
    source, target = tmp_path / "q8.gguf", tmp_path / "bf16.gguf"
    matrix, vector = np.random.default_rng(0).standard_normal((4, 64), np.float32), np.ones(8, np.float32)
    packed = quantize(matrix, GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(3)
    writer.add_key_value("tokenizer.ggml.tokens", ["a", "ß"], GGUFValueType.ARRAY, sub_type=GGUFValueType.STRING)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_norm.weight", vector)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    widen(source, target)
    reader = gguf.GGUFReader(target)
    assert reader.fields["llama.block_count"].contents() == 3
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "ß"]
    wide, kept = reader.tensors
    assert (wide.tensor_type, kept.tensor_type) == (GGMLQuantizationType.BF16, GGMLQuantizationType.F32)
    expected = dequantize(packed, GGMLQuantizationType.Q8_0)
    np.testing.assert_allclose(dequantize(wide.data, GGMLQuantizationType.BF16), expected, rtol=2**-8)
    np.testing.assert_array_equal(kept.data, vector)
