# One image, two flavours: FLAVOUR=gpu (the appliance) and FLAVOUR=cpu (the demo, no GPU).
#
#   docker build --build-arg FLAVOUR=cpu -t moe-appliance:cpu .
#
# Stages: base -> deps -> ours, runtime; base -> kernels -> runtime. Nothing compiles at start: there is no
# compiler there. Kernels are compiled by the nvcc of the engine's own pins: there is no second base image.
ARG FLAVOUR=gpu
# What everything runs on. The default of the cpu flavour is Debian's Python (compose.yaml).
# A release (RELEASE=1.2.0) is refused on a base that has no digest: BASE_IMAGE=name@sha256:...
ARG BASE_IMAGE=docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04
# gpu: build (compile here) or cache (taken from image/kernels, which `make kernels` fills). cpu: none.
ARG KERNELS=build

FROM ${BASE_IMAGE} AS base
ENV DEBIAN_FRONTEND=noninteractive PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore PIP_DEFAULT_TIMEOUT=60 PIP_RETRIES=8
# numactl: vLLM binds each worker with it.
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends ca-certificates python3 python3-venv numactl \
 && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*

# Apart, so that a release on a base that is only a tag fails at once and not after its packages.
FROM base AS pinned
ARG BASE_IMAGE
ARG RELEASE=unreleased
RUN case "$RELEASE $BASE_IMAGE" in \
    "unreleased "* | *@sha256:*) ;; \
    *) echo "release $RELEASE on $BASE_IMAGE, which is no fixed image: BASE_IMAGE=name@sha256:..." >&2; exit 1 ;; \
    esac

FROM base AS deps
ARG FLAVOUR
# Another index for torch alone; local wheels in image/wheels come first.
ARG TORCH_INDEX=""
ARG WITH_VLLM_EXL3=""
# 1: no copies of the wheels are kept for the next build.
ARG PIP_NO_CACHE_DIR=""
WORKDIR /build
# Only what the engine is made of: nothing else may make this layer stale.
COPY constraints/engine-${FLAVOUR}.in constraints/engine-${FLAVOUR}.txt constraints/
RUN python3 -m venv /opt/appliance
ENV PATH=/opt/appliance/bin:$PATH
COPY image/install.py image/
# hadolint ignore=DL3042
RUN --mount=type=bind,source=image/wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip python image/install.py engine

# Ours apart from the engine's gigabytes: a change of our code copies only our code.
FROM deps AS ours
COPY constraints/base.txt constraints/
COPY LICENSE NOTICE README.md pyproject.toml ./
COPY image/sbom.py /out/
COPY preflight/ preflight/
COPY kernels/ kernels/
COPY appliance/ appliance/
RUN python image/install.py appliance

# Without the engine: nvcc and what it needs, some hundred MB of the same pins.
FROM base AS kernels-build
ARG TORCH_CUDA_ARCH_LIST="9.0 12.0"
ARG TORCH_INDEX=""
ARG WITH_VLLM_EXL3=""
ARG MAX_JOBS=""
ARG PIP_NO_CACHE_DIR=""
ENV TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu
WORKDIR /build
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends python3-dev g++ ninja-build \
 && rm -rf /var/lib/apt/lists/*
COPY constraints/engine-gpu.in constraints/engine-gpu.txt constraints/
RUN python3 -m venv /opt/appliance
ENV PATH=/opt/appliance/bin:$PATH
COPY image/install.py image/
# hadolint ignore=DL3042
RUN --mount=type=bind,source=image/wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip FLAVOUR=gpu python image/install.py compiler
COPY kernels/ kernels/
COPY image/compile.py image/
RUN python image/compile.py build /kernels

FROM scratch AS kernels-out
COPY --from=kernels-build /kernels/ /

FROM base AS kernels-cache
COPY kernels/ /build/kernels/
COPY image/compile.py image/kernels/ /kernels/
RUN python3 /kernels/compile.py check /kernels

FROM base AS kernels-none
RUN mkdir /kernels

# hadolint ignore=DL3006
FROM kernels-${KERNELS} AS kernels

FROM deps AS runtime
ARG FLAVOUR
ARG BASE_IMAGE
ARG RELEASE=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="moe-appliance" \
      org.opencontainers.image.description="Serves a mixture-of-experts model that does not fit the GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${RELEASE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      moe-appliance.flavour="${FLAVOUR}"
# The numbers are fixed: volumes outlive images.
RUN --mount=type=bind,from=pinned,target=/pinned \
    groupadd --gid 10001 appliance \
 && useradd --uid 10001 --gid 10001 --home-dir /var/lib/appliance --no-create-home \
            --shell /usr/sbin/nologin appliance \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/appliance \
 && install -d -o 10001 -g 10001 -m 0755 /models
COPY --from=kernels /kernels/ /opt/kernels/
ENV PYTHONUNBUFFERED=1 HOME=/var/lib/appliance \
    PYTHONPATH=/opt/kernels TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    APPLIANCE_STATE_DIR=/var/lib/appliance APPLIANCE_AGENT_PORT=8001 \
    APPLIANCE_RELEASE=${RELEASE}
# setuptools built our wheel; the gpu flavour's vLLM pins an older one, which stays.
# hadolint ignore=DL4006
RUN --mount=type=bind,from=ours,source=/out,target=/out \
    kept=$([ "$FLAVOUR" = gpu ] && echo 'setuptools-*' || echo none) \
 && find /out -name '*.whl' ! -name "$kept" -print0 \
    | xargs -0 python -m pip install --quiet --no-cache-dir --no-index --no-deps \
 && python /out/sbom.py /opt/appliance/sbom.json \
 && if [ -f /opt/kernels/libexpert_kernels.so ]; then ln -s /opt/kernels/libexpert_kernels.so \
        "$(dirname "$(python -c 'import expert_kernels; print(expert_kernels.__file__)')")"; fi
USER 10001:10001
WORKDIR /var/lib/appliance
VOLUME ["/var/lib/appliance"]
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# Readiness, asked of the agent: a start takes as long as the weights take to load.
HEALTHCHECK --interval=5s --timeout=5s --start-period=1800s --retries=3 \
    CMD ["appliance", "health", "--quiet"]
ENTRYPOINT ["appliance", "container"]
