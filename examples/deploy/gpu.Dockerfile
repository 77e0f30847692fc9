# The package with GPU kernels, and Horovod over NCCL. In a clone:
#   docker build -f examples/deploy/gpu.Dockerfile -t tf_fusedrec:gpu .
#   docker run --rm --gpus all tf_fusedrec:gpu
# The CUDA of the image is that of TensorFlow's pinned release.
FROM nvidia/cuda:12.3.2-devel-ubuntu22.04 AS build
# The versions are those of Ubuntu's release.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ make patch python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /build
ENV PATH=/venv/bin:$PATH
COPY requirements requirements
RUN python3 -m venv /venv \
 && pip install --no-cache-dir --no-deps -r requirements/build.txt -r requirements/runtime.txt \
 && pip install --no-cache-dir 'tensorflow[and-cuda]==2.16.2'
# The operations of tools/horovod_wheel.py, with NCCL in the place of Gloo for tensors of a device.
RUN HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
    HOROVOD_WITHOUT_MPI=1 HOROVOD_GPU_OPERATIONS=NCCL \
    pip install --no-cache-dir --no-build-isolation horovod==0.28.1
COPY setup.py pyproject.toml README.md ./
COPY custom_ops custom_ops
COPY models models
COPY configs configs
COPY tf_fusedrec tf_fusedrec
RUN FUSEDREC_CUDA=1 pip install --no-cache-dir --no-deps --no-build-isolation .

FROM nvidia/cuda:12.3.2-runtime-ubuntu22.04
# As in cpu.Dockerfile.
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
