# The toolkit with torch for CUDA, whose wheels bring CUDA's libraries; the host needs NVIDIA's driver
# and its container toolkit. In the clone:
#
#   docker build -t fsdp2-toolkit .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD":/data fsdp2-toolkit train CONFIG --accelerate_config one_node
#
# For another torch (the CPU's, another CUDA, ROCm): --build-arg TORCH_INDEX=URL, with the URL that the
# selector on pytorch.org gives behind --index-url.
FROM python:3.11-slim-bookworm

ARG TORCH_INDEX=""
ARG EXTRAS=qlora,report,trackers

# torch.compile calls a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/fsdp2-toolkit
COPY constraints.txt ./
RUN version="$(sed -n 's/^torch==//p' constraints.txt)" \
    && pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$version"
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

RUN useradd --create-home trainer
USER trainer
ENV HF_HOME=/data/.cache/huggingface
WORKDIR /data
ENTRYPOINT ["toolkit"]
CMD ["--help"]
