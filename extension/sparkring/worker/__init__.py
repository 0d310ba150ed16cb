"""What runs where the ranks are: standard library and cloudpickle only."""
