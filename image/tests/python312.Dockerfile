# The gpu flavour's pins are of Python 3.12, which Debian bookworm has not: a copy of one found here.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends libffi8 libsqlite3-0 libbz2-1.0 liblzma5 \
        libreadline8 zlib1g libncursesw6 \
 && rm -rf /var/lib/apt/lists/*
COPY . /opt/python312
ENV LD_LIBRARY_PATH=/opt/python312/lib
ENV PATH=/opt/python312/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN python3 -m venv /tmp/v && rm -r /tmp/v && python3 -c "import ssl, sqlite3, ctypes, lzma"
