# The image in which areal-gym trains, on one machine or as the nodes of a Ray (docs/cluster.md).
#
#     docker build -t areal-gym .                                    CPUs, and NVIDIA GPUs: torch's wheels
#                                                                    bring CUDA, the host has the driver
#     docker build -t areal-gym \
#         --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 .    with nvcc, for kernels that are
#                                                                    compiled at run time
#     docker run --gpus all --shm-size=16g -v "$PWD/runs:/home/areal/runs" areal-gym train --env tir
#
# --shm-size: Ray's object store and the ranks' exchange on one machine lie in /dev/shm, of which Docker
# gives 64 MB; in Kubernetes, mount an emptyDir with medium Memory there. Mounted directories must be
# writable by user 10001, or run with --user.
ARG BASE=python:3.12-slim
FROM ${BASE}

# What pip installs: `--build-arg EXTRAS=train,ray,sglang`. For CPUs alone, two gigabytes less:
# `--build-arg PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"`.
ARG EXTRAS=train,ray,lora,data,viewer
ARG PIP_ARGS=""

# g++ compiles the small decoder's kernels; KubeRay's probes call wget. Bases without apt have what
# they have.
RUN if command -v apt-get >/dev/null; then \
        apt-get update -qq \
        && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            ca-certificates g++ procps wget \
            $(command -v python3 >/dev/null || echo python3 python3-dev python3-pip python3-venv) \
        && rm -rf /var/lib/apt/lists/*; \
    fi

# An environment of its own, which sees the packages of the base: one that has torch keeps it.
RUN python3 -m venv --system-site-packages --without-pip /opt/areal-gym
ENV PATH=/opt/areal-gym/bin:$PATH PYTHONUNBUFFERED=1

COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY areal_gym /src/areal_gym
RUN python3 -m pip --python /opt/areal-gym/bin/python install --no-cache-dir \
        --disable-pip-version-check -c /src/constraints.txt ${PIP_ARGS} "/src${EXTRAS:+[$EXTRAS]}" \
    && rm -rf /src

# Not root; written by hand, because not every base has useradd.
RUN echo "areal:x:10001:10001::/home/areal:/bin/sh" >>/etc/passwd \
    && echo "areal:x:10001:" >>/etc/group \
    && mkdir -p /home/areal/runs && chown -R 10001:10001 /home/areal
ENV HOME=/home/areal
USER 10001:10001
WORKDIR /home/areal
ENTRYPOINT ["areal-gym"]
CMD ["--help"]
