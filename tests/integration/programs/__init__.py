"""A table of training programs that plain DDP supports: see ``tests.integration.programs.running``."""
