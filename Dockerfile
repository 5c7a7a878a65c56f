# The processes of docker-compose.yml, with the very packages that the tests ran with, and no others. They run as a user without a name or
# home and write nothing but locks, in /tmp. No health check: `run` restarts what ends, and only the API (docker-compose.yml) has more to say.
# PACKAGES=run for commands, handlers, agents and the API; PACKAGES=spark for what runs on Spark, with Java.
ARG PACKAGES=run

FROM python:3.11-slim-bookworm AS base
ARG PACKAGES
RUN if [ "$PACKAGES" = spark ]; then \
        apt-get update && apt-get install --yes --no-install-recommends openjdk-17-jre-headless && rm -rf /var/lib/apt/lists/*; fi

FROM base AS build
ARG PACKAGES
WORKDIR /app
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY requirements requirements
RUN pip install --require-hashes --requirement requirements/build.txt \
    && pip install --require-hashes --no-build-isolation --requirement requirements/$PACKAGES.txt
COPY . .
RUN pip install --no-deps --no-build-isolation --editable . \
    && python -m compileall -q . \
    && pip uninstall --yes setuptools wheel pip

FROM base
RUN pip uninstall --yes --root-user-action=ignore setuptools wheel pip
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER 10001:10001
ENTRYPOINT ["samefold"]
