"""This folder is put on TensorBoard's PYTHONPATH: TensorBoard imports pkg_resources, which newer environments lack."""
