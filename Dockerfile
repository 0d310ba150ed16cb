# An image with the pinned versions, Horovod and JupyterLab, for a first look (Linux x86-64, without a GPU):
#
#     docker build --platform linux/amd64 --tag sparkring .
#     docker run --rm --publish 127.0.0.1:8888:8888 --shm-size 1g sparkring
#
# The second command prints an address with a token; open it in a browser. `--env JUPYTER_TOKEN=…` sets a token of your
# own. The shared memory is for the workers of PyTorch's DataLoader.
FROM python:3.11-slim

# Java comes from pip, in the extra `spark`: Debian's Java is too new for Spark 3.5.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home sparkring && install --directory --owner sparkring /opt/sparkring
USER sparkring
WORKDIR /opt/sparkring
COPY --chown=sparkring . .

# PyPI's torch for Linux comes with gigabytes of CUDA libraries; this index has the build for CPUs.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1
# The image is built only if the quickstart runs in it.
RUN make demo
RUN .venv/bin/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[all]' jupyterlab

EXPOSE 8888
# 0.0.0.0 is inside of the container; `--publish` decides who reaches it.
CMD [".venv/bin/python", "-m", "jupyterlab", "--ip=0.0.0.0", "--no-browser", "--notebook-dir=notebooks"]
