# The image of a server: kernels and wheel are built on one base, installed and run on a slim one.
#   make image                for GPUs (the last stage)
#   make image TARGET=cpu     for the CPU alone, a tenth of the size
# Bases are arguments, to be pinned by digest at a release. They must be of one distribution, so that
# the kernels meet the C library that they were built with; docs/deployment.md says more.
ARG CUDA_BUILDER=nvidia/cuda:12.9.1-devel-ubuntu24.04
ARG CPU_BUILDER=ubuntu:24.04
ARG RUNTIME=ubuntu:24.04

FROM ${CPU_BUILDER} AS cpu-wheel
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Versions of packages are the distribution's: its security updates are wanted.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r deploy/requirements/build.txt \
    && /build/bin/pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && /build/bin/python -m qlinear_service.kernels.build --cpu \
    && /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${CUDA_BUILDER} AS cuda-wheel
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# Machine code for every architecture of ours; needs no GPU.
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r deploy/requirements/build.txt \
    && /build/bin/pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && /build/bin/python -m qlinear_service.kernels.build --cpu \
    && /build/bin/python -m qlinear_service.kernels.build --cuda --prebuilt \
    && /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# No compiler from here on.
FROM ${RUNTIME} AS runtime
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --system --gid 10001 qlinear \
    && useradd --system --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent \
       --shell /usr/sbin/nologin qlinear \
    && install -d -o 10001 -g 10001 /models /var/cache/qlinear
# The cache may be read-only or absent: it only saves the measuring of the first start.
ENV PATH=/opt/qlinear/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    QLINEAR_CACHE_DIR=/var/cache/qlinear
WORKDIR /models
USER 10001:10001
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s --retries=3 \
    CMD ["qlinear", "doctor", "--health"]
# It listens on the loopback address unless QLINEAR_HOST says otherwise.
ENTRYPOINT ["qlinear"]
CMD ["serve", "/models"]
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="qlinear" \
      org.opencontainers.image.description="A gRPC service for 4-bit and 8-bit quantized linear layers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM ${RUNTIME} AS environment
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/qlinear && python3 -m venv /sbom
# What is installed is locked, with hashes (deploy/requirements); then pip goes, too.
COPY deploy/requirements /requirements
RUN /sbom/bin/pip install --no-cache-dir --require-hashes -r /requirements/sbom.txt

FROM environment AS cpu-environment
ARG CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/qlinear/bin/pip install --no-cache-dir --no-deps --require-hashes \
    --index-url "${CPU_TORCH_INDEX}" -r /requirements/cpu-torch.txt \
    && /opt/qlinear/bin/pip install --no-cache-dir --no-deps --require-hashes -r /requirements/cpu.txt
COPY --from=cpu-wheel /wheels /wheels
ARG VERSION
RUN /opt/qlinear/bin/pip install --no-index --no-deps /wheels/qlinear-"${VERSION}"*.whl \
    && /opt/qlinear/bin/pip check \
    && /opt/qlinear/bin/pip uninstall --yes pip \
    && cp /requirements/licences.md /opt/qlinear/ \
    && /sbom/bin/cyclonedx-py environment -o /opt/qlinear/sbom.cdx.json /opt/qlinear/bin/python

FROM environment AS gpu-environment
RUN /opt/qlinear/bin/pip install --no-cache-dir --no-deps --require-hashes -r /requirements/gpu.txt
COPY --from=cuda-wheel /wheels /wheels
ARG VERSION
RUN /opt/qlinear/bin/pip install --no-index --no-deps /wheels/qlinear-"${VERSION}"*.whl \
    && /opt/qlinear/bin/pip check \
    && /opt/qlinear/bin/pip uninstall --yes pip \
    && cp /requirements/licences.md /opt/qlinear/ \
    && /sbom/bin/cyclonedx-py environment -o /opt/qlinear/sbom.cdx.json /opt/qlinear/bin/python

FROM runtime AS cpu
COPY --from=cpu-environment /opt/qlinear /opt/qlinear

FROM runtime AS gpu
# What the NVIDIA container toolkit puts into the container: the driver's library and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=gpu-environment /opt/qlinear /opt/qlinear
