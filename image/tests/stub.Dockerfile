# An image of ours whose engine is a stub that writes down what it was started as.
ARG IMAGE
FROM ${IMAGE}
COPY engine_stub.py /opt/engine_stub.py
ENV APPLIANCE_ENGINE_PYTHON=/opt/engine_stub.py
