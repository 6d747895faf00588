"""The table: every situation is one entry of these rows."""

from tests.integration.programs import layer_rows, manual_rows, plain_rows
from tests.integration.programs.world import Row

_PARTS = (manual_rows.ROWS, plain_rows.ROWS, layer_rows.ROWS)
ROWS: dict[str, Row] = {name: row for part in _PARTS for name, row in part.items()}
assert len(ROWS) == sum(map(len, _PARTS)), "two rows have the same name"
