"""The parts of sparkring-build-horovod: what is built, with which CUDA and NCCL, how, and whether it works."""
