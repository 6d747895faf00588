"""Training programs that plain DDP runs right, as rows of one table: see ``tests.integration.programs.running``."""
