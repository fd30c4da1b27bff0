# An image whose command is sparsedepth, with bash for the job files in docs:
#   make image                                   for CPUs
#   make image BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime   with CUDA
# Docker itself: docker build -t sparsedepth --build-arg BASE=... .
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH=torch==2.13.0
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore
# hadolint ignore=DL3013 # TORCH has its version
RUN pip install ${TORCH}
WORKDIR /opt/sparsedepth
COPY pyproject.toml constraints.txt PACKAGE.md LICENSE ./
COPY sparsedepth ./sparsedepth
RUN pip install -c constraints.txt . && sparsedepth --help > /dev/null
WORKDIR /work
CMD ["sparsedepth", "--help"]
