# An image to begin with: shardwise and PyTorch. Your script goes on top (FROM this one), or is mounted.
#   docker build --tag shardwise .
# For GPUs the plain index of PyPI is right; CPU builds alone are far smaller:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu --tag shardwise .
FROM python:3.12-slim-bookworm

ARG TORCH_INDEX=https://pypi.org/simple
# there is no git in the image to ask: docker build --build-arg VERSION=$(git describe --tags)
ARG VERSION=0.0.0
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/shardwise
COPY constraints.txt ./
# a layer of its own: torch is large, and changes less often than what is above it
RUN python -m pip install --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple -c constraints.txt torch numpy
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN SETUPTOOLS_SCM_PRETEND_VERSION="$VERSION" python -m pip install -c constraints.txt . && shardwise --version

RUN useradd --create-home --uid 1000 ranks
# by number: Kubernetes cannot tell that a name is not root (runAsNonRoot)
USER 1000:1000
WORKDIR /home/ranks
CMD ["shardwise", "doctor"]
