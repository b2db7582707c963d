# The HTTP server on CPUs. PIP_EXTRA_INDEX_URL is PyTorch's index of CPU builds; without it, pip takes torch with CUDA.
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... -t sensorium .
#   docker run -p 8000:8000 -e SENSORIUM_API_KEY=... -v models:/home/sensorium/.cache/huggingface sensorium MODEL
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/venv
RUN /opt/venv/bin/pip install --no-cache-dir -c constraints.txt setuptools torch
RUN /opt/venv/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation ".[serve]"

FROM python:3.11-slim
RUN useradd --create-home --uid 1000 sensorium && install -d -o sensorium /home/sensorium/.cache/huggingface /home/sensorium/data
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
USER sensorium
WORKDIR /home/sensorium
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["sensorium", "serve", "--host", "0.0.0.0"]
CMD ["/opt/venv/lib/python3.11/site-packages/sensorium/assets/tiny-vl"]
