# The library with what real federations and privacy need, from the lock, by hashes. deploy/README.md says how it is used.
FROM python:3.12-slim AS build
WORKDIR /src
COPY requirements requirements
RUN python -m venv /opt/fedbilevel \
    && /opt/fedbilevel/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement requirements/build.txt \
    && /opt/fedbilevel/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement requirements/flare.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN /opt/fedbilevel/bin/pip install --no-cache-dir --no-index --no-deps --no-build-isolation . \
    && /opt/fedbilevel/bin/pip check

FROM python:3.12-slim
COPY --from=build /opt/fedbilevel /opt/fedbilevel
ENV PATH=/opt/fedbilevel/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 fedbilevel && install --directory --owner=fedbilevel /kits /app /runs
USER fedbilevel
WORKDIR /app
CMD ["fedbilevel", "--help"]
