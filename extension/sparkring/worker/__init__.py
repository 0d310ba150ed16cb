"""The code that runs on the machines of the ranks. It needs only the standard library and cloudpickle."""
