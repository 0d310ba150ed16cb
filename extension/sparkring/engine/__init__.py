"""What runs cells and other work: each folder is a product, which uses `run`; `doctor` examines the setup."""
