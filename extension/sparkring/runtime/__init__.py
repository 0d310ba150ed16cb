"""Modules for ranks and the driver: ranks' numbers, reports, storage, interrupts, and the checkpoint to resume from."""
