"""What ranks and the driver share: the world, reports, storage, interrupts, and the point to resume from."""
