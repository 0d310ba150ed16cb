"""The code that runs on the machines of the ranks.

It needs only the standard library and cloudpickle; `model`, the process that has a model, needs pyarrow and NumPy, too.
"""
