"""What the code expects of every row is what the database insists on."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from sqlalchemy import Table

from coordinator.storage.nodes import NodeRow
from coordinator.storage.relays import RegisteredRelay
from coordinator.storage.schema import nodes, relays


@pytest.mark.parametrize(("table", "row"), [(nodes, NodeRow), (relays, RegisteredRelay)], ids=["nodes", "relays"])
def test_a_column_is_empty_only_where_the_code_expects_it(table: Table, row: type) -> None:
    """One row without a time, written by whatever mistake, would fail the page of nodes and every list of relays."""
    expected = {name: type(None) in get_args(kind) for name, kind in get_type_hints(row).items()}
    assert {name: table.c[name].nullable for name in expected} == expected
