"""The code that runs where the ranks are. It needs only the standard library and cloudpickle."""
