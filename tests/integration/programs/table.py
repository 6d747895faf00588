"""The table: every situation is one entry of these rows."""

from tests.integration.programs import (
    automatic_rows,
    layer_rows,
    manual_rows,
    plain_rows,
    player_rows,
    scaler_rows,
    trainer_model_rows,
    trainer_option_rows,
    wrapper_rows,
)
from tests.integration.programs.world import Row

_PARTS = (
    trainer_option_rows.ROWS,
    trainer_model_rows.ROWS,
    automatic_rows.ROWS,
    manual_rows.ROWS,
    player_rows.ROWS,
    plain_rows.ROWS,
    scaler_rows.ROWS,
    layer_rows.ROWS,
    wrapper_rows.ROWS,
)
ROWS: dict[str, Row] = {name: row for part in _PARTS for name, row in part.items()}
assert len(ROWS) == sum(map(len, _PARTS)), "two rows have the same name"
FIRST_OF_PARTS = {next(iter(part)) for part in _PARTS}
