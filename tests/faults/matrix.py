"""All rows, in the order of the table."""

from collections import Counter

from tests.faults import join_rows, launcher_rows, network_rows, rank_rows
from tests.faults.rows import Row

ROWS: list[Row] = [*rank_rows.ROWS, *launcher_rows.ROWS, *network_rows.ROWS, *join_rows.ROWS]

assert max(Counter(row.name for row in ROWS).values()) == 1, "rows are told apart by name"
