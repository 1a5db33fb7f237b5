# An image of ours that starts and whose engine cannot: found only when it is switched to.
ARG IMAGE
FROM ${IMAGE}
USER root
RUN rm -r /opt/appliance/lib/python3*/site-packages/vllm/engine
USER 10001:10001
