"""What `make release` refuses: a release that its changelog does not name would go out under the last one's text."""

from __future__ import annotations

import pytest

from tools.make_release import Unready, check_changelog

TEXT = "# Changelog\n\n## {}\n\n### Added\n\n## 0.1.0 - 2026-01-01\n"


def test_a_changelog_whose_newest_section_is_the_version_with_a_date_passes() -> None:
    check_changelog(TEXT.format("0.2.0 - 2026-11-27"), "0.2.0")


@pytest.mark.parametrize(
    "heading", ["0.2.0 (unreleased)", "Unreleased", "0.2.0", "0.3.0 - 2026-11-27", "0x2.0 - 2026-11-27"]
)
def test_any_other_newest_section_is_named_with_what_to_write(heading: str) -> None:
    with pytest.raises(Unready, match=r"write '## 0\.2\.0 - YYYY-MM-DD' there") as refused:
        check_changelog(TEXT.format(heading), "0.2.0")
    assert heading in refused.value.message


def test_a_changelog_without_a_section_is_refused() -> None:
    with pytest.raises(Unready):
        check_changelog("# Changelog\n", "0.2.0")
