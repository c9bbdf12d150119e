"""What keeps the tiers apart, and flaky tests few: whoever adds a test relies on it without looking."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

OTHERS = ("asyncio", "cacheprovider", "hypothesispytest", "schemathesis", "xdist")
PLUGINS = ("-p", "tiers", *(option for name in OTHERS for option in ("-p", f"no:{name}")))

FLAKY = """
    @pytest.mark.unit
    @pytest.mark.quarantine(reason="a port is taken", since="{since}")
    def test_{number}():
        assert False
"""


@pytest.fixture
def run(pytester: pytest.Pytester):
    def run(code: str) -> pytest.RunResult:
        pytester.makepyfile("import subprocess, pytest\n" + code)
        return pytester.runpytest_inprocess(*PLUGINS, "--strict-markers")

    return run


def test_a_unit_test_that_starts_a_process_fails_and_another_tiers_does_not(run) -> None:
    start = "@pytest.mark.{0}\ndef test_{0}():\n    subprocess.run(['true'], check=True)\n"
    result = run(start.format("unit") + start.format("system"))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*a unit test starts no process*"])


def test_a_run_ends_with_its_tiers_and_how_to_run_what_was_skipped(run) -> None:
    code = "@pytest.mark.service\n@pytest.mark.skip(reason='no llama: apt install llama')\ndef test_a():\n    pass\n"
    run(code + "@pytest.mark.unit\ndef test_b():\n    pass\n").stdout.fnmatch_lines(
        ["unit *1 tests*s of * s", "* 1  no llama: apt install llama"]
    )


def test_files_whose_tests_ask_for_most_time_begin_first(run, pytester: pytest.Pytester) -> None:
    """Begun last, the longest file would keep one process busy for minutes after the others have ended."""
    code = "@pytest.mark.unit\n@pytest.mark.timeout({0})\ndef test_{0}():\n    pass\n"
    pytester.makepyfile(test_z="import pytest\n" + code.format(70) + code.format(80))
    result = run("@pytest.mark.unit\ndef test_a():\n    pass\n" + code.format(100))
    result.stdout.fnmatch_lines(["test_z.py .*", "test_files_whose_tests_ask_for_most_time_begin_first.py ..*"])


def test_each_process_begins_to_read_at_another_file_and_all_run_them_in_one_order(run, pytester) -> None:
    """In a fresh clone each would compile every file; and pytest-xdist ends a run whose processes differ in order."""
    worker = {"workerid": "gw1", "workercount": 3}
    pytester.makeconftest(f"def pytest_configure(config):\n    config.workerinput = {worker}")
    code = "with open('read', 'a') as read:\n    read.write(__name__[-1])\n@pytest.mark.unit\ndef test():\n    pass\n"
    pytester.makepyfile(test_y="import pytest\n" + code, test_z="import pytest\n" + code)
    result = run(code)
    assert (pytester.path / "read").read_text() == "yzr", "its own file is called ..._order"
    result.stdout.fnmatch_lines(["test_each_*", "test_y.py*", "test_z.py*"])


def test_a_flaky_test_in_quarantine_runs_and_fails_nothing(run) -> None:
    result = run(FLAKY.format(number=1, since="2999-01-01").replace("\n    ", "\n"))
    result.assert_outcomes(xfailed=1)
    assert result.ret == 0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("".join(FLAKY.format(number=n, since="2999-01-01") for n in range(6)), "more than 5"),
        (FLAKY.format(number=1, since="2000-01-01"), "before the last release"),
        (FLAKY.replace('reason="a port is taken", ', "").format(number=1, since="2999-01-01"), "quarantine takes"),
    ],
    ids=["too many", "too old", "no reason"],
)
def test_the_quarantine_is_small_young_and_explained(
    run, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    import tiers

    monkeypatch.setattr(tiers, "_last_release", lambda: tiers.date(2026, 1, 1))
    result = run(code.replace("\n    ", "\n"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in result.stdout.str() + result.stderr.str()
