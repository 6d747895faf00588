"""State of averagers: residuals, snapshots, and seals of saved state."""
