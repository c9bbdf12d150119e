"""A typing error in run.toml costs one look: the sentence names the table and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.errors import BadConfiguration
from coordinator.run.definition import read_run_file

ENVIRONMENT = '[[environments]]\nname = "arithmetic"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[samplin]\n", "no key 'samplin' at the top level; did you mean 'sampling'"),
        ("[sampling]\ngrupsize = 1\n", r"no key 'grupsize' in \[sampling\]; did you mean 'group_size'"),
        (f"{ENVIRONMENT}wieght = 2\n", r"no key 'wieght' in \[environments\]; did you mean 'weight'"),
        (
            f"{ENVIRONMENT}[environments.tool]\nnam = 2\n",
            r"in \[environments.tool\], where a run can have",
        ),
        ("[limits.honest.margin]\nmeen = 2\n", r"in \[limits.honest.margin\]; did you mean 'mean'"),
        ("[training]\nsteps = -1\n", r"docs/run-toml.md"),
    ],
)
def test_a_mistyped_key_is_answered_with_the_nearest_one(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'name = "x"\n{text if "environments" in text else ENVIRONMENT + text}')
    with pytest.raises(BadConfiguration, match=said):
        read_run_file(tmp_path / "run.toml")
