"""A folder for TensorBoard's PYTHONPATH, with a module that TensorBoard imports and current environments lack."""
