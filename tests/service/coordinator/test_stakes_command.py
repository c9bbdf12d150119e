"""The operator's book of stakes, by its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from actors import PUBLIC_KEY, spec_of, who
from click.testing import CliRunner

from coordinator.commands.stakes import stakes
from coordinator.errors import BadConfiguration
from coordinator.run.home import create_home

NODE = who("node")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of()).database.close()
    return tmp_path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(stakes, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_payments_add_up_and_are_entered_once(data: Path) -> None:
    assert "nobody" in run("list", "--data", data)
    run("enter", "--data", data, NODE, 700, "--why", "transfer 1")
    run("enter", "--data", data, NODE, 300, "--why", "transfer 2")
    with pytest.raises(BadConfiguration, match="before"):
        run("enter", "--data", data, NODE, 300, "--why", "transfer 2")
    assert run("list", "--data", data).split() == [NODE, "1000"]


def test_nobody_is_paid_back_more_than_is_held(data: Path) -> None:
    run("enter", "--data", data, NODE, 100, "--why", "transfer 1")
    with pytest.raises(BadConfiguration, match="cannot be paid back"):
        run("enter", "--data", data, "--why", "return 1", "--", NODE, -101)
    run("enter", "--data", data, "--why", "return 2", "--", NODE, -100)
    assert run("list", "--data", data).split() == [NODE, "0"]


def test_a_name_that_is_no_nodes_is_refused(data: Path) -> None:
    result = CliRunner().invoke(stakes, ["enter", "--data", str(data), "alice", "1", "--why", "x"])
    assert result.exit_code == 2
    assert "64 hexadecimal digits" in result.output
