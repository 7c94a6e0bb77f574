# The loader, prep, bench and the examples in one image, for machines with an NVIDIA driver and for those without:
#
#   docker build -t dali-pipes:0.1.0 .
#   docker run --rm --gpus all --shm-size=8g dali-pipes:0.1.0 doctor
#   docker build --target test -t dali-pipes:test . && docker run --rm --shm-size=2g dali-pipes:test
#
# deploy/docker.md says what the arguments are for, what the image weighs, and why.

# torch and DALI bring their own CUDA libraries as wheels, of CUDA 13 by default: of NVIDIA's three flavours
# `base` is the one that has no second set of them. What it adds to Ubuntu is cuda-compat, by which a data centre's
# driver of an older branch may do, and the variables that the container runtime reads.
ARG CUDA_IMAGE=nvcr.io/nvidia/cuda:13.2.0-base-ubuntu24.04@sha256:36cccda4bebc3b0b1ebe1907ead8169cf144d45df890be871b36b304cf91145a

FROM ${CUDA_IMAGE} AS base
# tini reaps what a command leaves behind and passes signals on: a program that is process 1 ignores SIGTERM unless it
# asks for it. NCCL looks for libibverbs when it starts, and without it takes sockets instead of InfiniBand.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --no-install-recommends --yes ibverbs-providers libibverbs1 libjpeg-turbo-progs python3 tini \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH


FROM base AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --no-install-recommends --yes python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
# Which CUDA both torch and DALI are for: 13, or 12 for drivers that know CUDA 12 only, with an older torch.
ARG CUDA=13
# "bench,demo" adds scikit-image's photographs, "bench,parquet" tables in Parquet, "bench,kuberay" a
# Ray for Kubernetes; "bench" is what the commands need.
ARG EXTRAS=bench
# Where torch comes from, if not PyPI: https://download.pytorch.org/whl/cpu, with CUDA=none, for a small image without a
# GPU. What torch requires comes from PyPI: that index need not have the pinned versions.
ARG TORCH_INDEX=
WORKDIR /build
COPY pyproject.toml constraints.txt ./
COPY deploy/requirements.py deploy/cuda12.txt deploy/cuda13.txt deploy/hashes.txt deploy/
RUN python3 deploy/requirements.py --cuda "$CUDA" --extras "$EXTRAS" > requirements.txt \
 && python3 deploy/requirements.py --cuda "$CUDA" --pins > pins.txt
# pip says what it would install; it installs those wheels alone whose hashes are known. Those of TORCH_INDEX are not.
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ -n "$TORCH_INDEX" ]; then \
      pip install --no-deps --index-url "$TORCH_INDEX" -c pins.txt torch torchvision; \
    fi \
 && pip install --dry-run --quiet --only-binary :all: --report report.json -c pins.txt -r requirements.txt \
 && python3 deploy/requirements.py --hashes report.json > hashed.txt \
 && pip install --require-hashes --only-binary :all: --no-deps -r hashed.txt
# What needs a compiler, which this image has not: triton and headers serve torch.compile. And DALI for other Pythons.
ARG WITH_COMPILE=0
COPY deploy/prune.sh deploy/
RUN if [ "$WITH_COMPILE" != 1 ]; then deploy/prune.sh /opt/venv; fi
COPY README.md LICENSE ./
COPY prep prep
COPY dali_pipes dali_pipes
COPY bench bench
RUN pip install --no-cache-dir --no-deps --no-build-isolation .


# What the runtime image has, and with it all that the tests want; nothing of it is shipped.
FROM build AS test
# Said again: buildah does not hand on the arguments of the stage before.
ARG CUDA=13
ARG WITH_COMPILE=0
WORKDIR /opt/dali-pipes
RUN python3 /build/deploy/requirements.py --cuda "$CUDA" --extras dev > /build/requirements-dev.txt
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c /build/pins.txt -r /build/requirements-dev.txt \
 && if [ "$WITH_COMPILE" != 1 ]; then /build/deploy/prune.sh /opt/venv; fi
COPY . .
ENV PYTHONPATH=/opt/dali-pipes PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/dali-pipes/deploy/entrypoint.sh"]
CMD ["python3", "-m", "pytest", "-p", "no:cacheprovider"]


FROM base AS runtime
ARG WITH_COMPILE=0
# hadolint ignore=DL3008
RUN if [ "$WITH_COMPILE" = 1 ]; then \
      apt-get update \
   && apt-get install --no-install-recommends --yes gcc libc6-dev python3-dev \
   && rm -rf /var/lib/apt/lists/*; \
    fi
# Directories to mount things at; as /tmp they are anybody's, for users that the image does not know.
RUN groupadd --gid 10001 dali-pipes \
 && useradd --uid 10001 --gid 10001 --create-home dali-pipes \
 && install -d -m 1777 /cache /data /runs
COPY --from=build /opt/venv /opt/venv
WORKDIR /opt/dali-pipes
COPY examples examples
COPY deploy/entrypoint.sh deploy/
COPY deploy/slurm/node.sh deploy/slurm/ray-node.sh deploy/slurm/
# video: nvJPEG loads libnvcuvid for the JPEG engines, and decodes without them, and without a word, where it is not there.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="dali-pipes" \
      org.opencontainers.image.description="WebDataset shards in AIStore, read and decoded by DALI in an order that a seed fixes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
# A number, so that Kubernetes can tell that it is not root (runAsNonRoot).
USER 10001:10001
# A job, not a server: it is healthy while it runs, and says by its exit code how it went.
HEALTHCHECK NONE
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/dali-pipes/deploy/entrypoint.sh"]
CMD ["dali-pipes", "--help"]
