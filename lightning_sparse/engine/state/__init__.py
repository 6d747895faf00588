"""State of averagers: residuals, snapshots, and seals on what is saved."""
