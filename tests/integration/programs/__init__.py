"""Training programs that plain DDP runs right, as rows of one table: see :mod:`tests.integration.programs.table`."""
