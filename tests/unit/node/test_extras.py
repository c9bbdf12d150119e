"""The hint of a missing package is a command that works where it is read, and never names somebody else's project."""

from __future__ import annotations

from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from node.runtime import extras


def test_what_is_hinted_works_in_a_clone_a_wheel_and_an_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needed = ["boto3>=1.40; extra == 's3'", "click>=8", 'torch<3,>=2.9; extra == "worker"', "a; extra == 'worker'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: needed)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    assert extras.install_hint("worker") == f"pip install -e '{tmp_path}[worker]'"
    (tmp_path / "pyproject.toml").unlink()
    assert extras.install_hint("worker") == "pip install 'torch<3,>=2.9' a"
    monkeypatch.setenv(extras.IMAGE, "worker")
    assert extras.install_hint("s3") == "build the image with --build-arg EXTRAS=worker,s3"


def test_another_toploc_in_the_place_of_ours_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyPI's overwrites the folder, and an audit then dies of an undefined symbol."""
    assert extras.overwritten_toploc() is None
    for place, is_ours in ((tmp_path, True), (extras.ROOT, False)):
        information = tmp_path / "toploc-0.1.6.dist-info"
        information.mkdir(exist_ok=True)
        (information / "METADATA").write_text("Name: toploc\nVersion: 0.1.6\n")
        other = PathDistribution(information)
        monkeypatch.setattr(other, "locate_file", place.joinpath)
        monkeypatch.setattr("importlib.metadata.distribution", lambda _, other=other: other)
        said = extras.overwritten_toploc()
        assert (said is None) == is_ours
    assert said is not None
    assert "toploc 0.1.6 of another project" in said
