# Only the first stage has pip and what it downloads; the image has the environment that it made.
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY changelog changelog
COPY deltawriters deltawriters
COPY sink sink
# Spark's version is the one that the whole suite runs on: others need packages of their own version.
RUN python -m venv /opt/rowdelta \
 && /opt/rowdelta/bin/pip install --no-cache-dir --no-compile '.[postgres]' pyspark==4.1.1 \
 && /opt/rowdelta/bin/pip uninstall --yes setuptools pip

FROM python:3.11.14-slim-bookworm
RUN apt-get update \
 && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home rowdelta \
 && install --directory --owner rowdelta /data
COPY --from=build /opt/rowdelta /opt/rowdelta
ENV PATH=/opt/rowdelta/bin:$PATH
# by number, so that Kubernetes can see that it isn't root (`runAsNonRoot`)
USER 10001
WORKDIR /data

# Spark's packages and the archive of its classes, so that the container starts without downloading them, and fast.
COPY docs/examples/stack/sink.yaml /tmp/sink.yaml
RUN rowdelta warm /tmp/sink.yaml

ENTRYPOINT ["rowdelta"]
CMD ["--help"]
