#!/bin/sh
# Downloads wheels for a GPU machine without network access: benchmarks/gpu/wheels.sh [FOLDER]  (default .whl, 25 MB)
#
# The GPU machine must have Python 3.12 on x86-64, torch, triton, transformers, tokenizers, safetensors, numpy, their
# dependencies, and CUDA's compiler. The packages below are added, in the versions of constraints.txt. On that machine:
#
#   python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target SITE .whl/*.whl
#   python3 -m compileall -q -j 0 SITE   # as pip does; also the folder of torch, if `trellis doctor` asks for it
#   PYTHONPATH=SITE python3 -m benchmarks.gpu
#
# flashinfer-python compiles its kernels on first use. It declares nvidia-cutlass-dsl, cuda-tile and
# nvidia-cudnn-frontend, hundreds of megabytes for kernels that are not used here; it works without them.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-.whl}

packages="
    annotated-types anyio apache-tvm-ffi blake3 fastapi gguf httptools llguidance msgspec opentelemetry-api orjson prometheus-client
    prometheus-fastapi-instrumentator pydantic pydantic-core pydantic-settings python-dotenv pyzmq sse-starlette starlette
    typing-extensions typing-inspection uvicorn websockets xgrammar
"
pinned=$(for name in $packages; do grep "^$name==" constraints.txt || exit 1; done)
requirements="flashinfer-python==0.6.13 $pinned $(grep '^pytest-asyncio==' constraints-dev.txt)"

platforms=
for tag in manylinux_2_35 manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms="$platforms --platform ${tag}_x86_64"
done

mkdir -p "$folder"
# Unquoted on purpose: these are lists of words.
${PYTHON:-python3} -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp $platforms --dest "$folder" $requirements
ls -l "$folder"/*.whl | awk '{ printf "%8.2f MB  %s\n", $5 / 1e6, $9; sum += $5 } END { printf "%8.2f MB in %d wheels\n", sum / 1e6, NR }'
