"""A folder for TensorBoard's PYTHONPATH: what it imports and an environment of today does not have."""
