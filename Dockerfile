# docker build -t minserve .
# docker run --gpus all -p 8000:8000 -v minserve-cache:/home/minserve/.cache minserve --model Qwen/Qwen3-8B
#
# The base is plain Python, not nvidia/cuda: torch's wheels bring their own CUDA libraries and the NVIDIA container
# toolkit brings the driver, so a CUDA base would add gigabytes that nothing loads. What Triton needs besides is a C
# compiler and Python's headers; this image of Python has the headers.
FROM python:3.12-slim

RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

# Slowest and most stable first: a change of the code rebuilds the last layers only.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --index-url "$TORCH_INDEX" "$TORCH"

WORKDIR /src
COPY tools/requirements.py tools/requirements.py
COPY pyproject.toml .
RUN python tools/requirements.py > requirements.txt && pip install -r requirements.txt

COPY LICENSE README.md ./
COPY kernels kernels
COPY models models
COPY minserve minserve
RUN pip install --no-deps .

# The cache (hub downloads, the converted default model, compiled kernels) belongs to the user and outlives containers.
RUN useradd --create-home --uid 1000 minserve && install -d -o minserve -g minserve /home/minserve/.cache
USER minserve
WORKDIR /home/minserve
ENV HF_HOME=/home/minserve/.cache/huggingface TRITON_CACHE_DIR=/home/minserve/.cache/triton
VOLUME /home/minserve/.cache

# What the NVIDIA container toolkit mounts from the host, also where `--gpus` is not how GPUs are asked for.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The long start period is for the first download; publish another port with -p instead of passing --port.
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["minserve", "--host", "0.0.0.0"]
