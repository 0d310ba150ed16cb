"""Keeps code for other packages working: sparkdl's import paths, Horovod on Keras 3, tf-keras, TensorBoard."""
