"""Modules for ranks and the driver: a rank's place, reports, storage, interrupts, and the checkpoint to resume from."""
