"""Convert a GGUF file's quantised weights to bfloat16: `python -m benchmarks.widen SOURCE.gguf TARGET.gguf`.

With it llama.cpp computes with the same weights as the other servers.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType, Keys
from gguf.quants import dequantize, quantize

_FILE_TYPE_BF16 = 32
_WRITTEN_ANYWAY = (Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE, Keys.General.QUANTIZATION_VERSION)


def widen(source: Path, target: Path) -> None:
    """Copy `source` to `target` with matrices as bfloat16 and everything else unchanged."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_file_type(_FILE_TYPE_BF16)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _WRITTEN_ANYWAY:
            of_items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of_items)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 2:
            writer.add_tensor(
                tensor.name, quantize(values, GGMLQuantizationType.BF16), raw_dtype=GGMLQuantizationType.BF16
            )
        else:
            writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.widen", description=(__doc__ or "").split(":", 1)[1].strip()
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    widen(args.source, args.target)


if __name__ == "__main__":
    main()
