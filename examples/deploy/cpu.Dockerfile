# The package with Horovod, for training on CPUs. In a clone:
#   docker build -f examples/deploy/cpu.Dockerfile -t tf_fusedrec .
#   docker run --rm tf_fusedrec
FROM debian:bookworm-slim AS build
# The versions are those of Debian's release.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ make patch python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /build
ENV PATH=/venv/bin:$PATH
COPY requirements requirements
RUN python3 -m venv /venv \
 && pip install --no-cache-dir --no-deps -r requirements/build.txt -r requirements/runtime.txt
COPY tools tools
RUN python -m tools.horovod_wheel
COPY setup.py pyproject.toml README.md ./
COPY custom_ops custom_ops
COPY models models
COPY configs configs
COPY tf_fusedrec tf_fusedrec
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

FROM debian:bookworm-slim
# horovodrun starts the ranks of other hosts by ssh. Every container makes its own host keys (mpijob.yaml). Kubernetes
# mounts the users' keys readable to a group, which sshd refuses in its strict mode.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends openssh-client openssh-server python3 \
 && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
 && mkdir -p /run/sshd \
 && echo 'StrictModes no' > /etc/ssh/sshd_config.d/mounted_keys.conf
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH
WORKDIR /job
COPY configs configs
CMD ["fusedrec", "doctor"]
