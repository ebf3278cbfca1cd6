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

# Spark's packages, so that the container starts without downloading them.
COPY docs/examples/kafka/sink.yaml /tmp/sink.yaml
RUN python -c "from sink import config, session; session.start(config.load('/tmp/sink.yaml')).stop()"

ENTRYPOINT ["rowdelta"]
CMD ["--help"]
