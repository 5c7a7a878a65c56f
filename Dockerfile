# The processes of docker-compose.yml, with the very packages that the tests ran with.
FROM python:3.11-slim-bookworm AS build
WORKDIR /app
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY requirements-build.txt requirements.txt ./
RUN pip install --require-hashes --requirement requirements-build.txt \
    && pip install --require-hashes --no-build-isolation --requirement requirements.txt
COPY . .
RUN pip install --no-deps --no-build-isolation --editable .

FROM python:3.11-slim-bookworm
RUN useradd --system --no-create-home samefold
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER samefold
ENTRYPOINT ["samefold"]
