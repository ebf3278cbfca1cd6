FROM python:3.11-slim-bookworm

RUN apt-get update \
 && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rowdelta
COPY pyproject.toml README.md LICENSE ./
COPY changelog changelog
COPY deltawriters deltawriters
COPY sink sink
RUN pip install --no-cache-dir .

RUN useradd --create-home rowdelta && install --directory --owner rowdelta /data
USER rowdelta
WORKDIR /data

# Spark's packages and the archive of its classes, so that the container starts without downloading them, and fast.
COPY docs/examples/stack/sink.yaml /tmp/sink.yaml
RUN rowdelta warm /tmp/sink.yaml

ENTRYPOINT ["rowdelta"]
CMD ["--help"]
