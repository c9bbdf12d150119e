"""What a grader raises.

GraderFault      this machine cannot tell; `code` says why
BadAnswer        an expected answer that nothing can match, which is the dataset's fault
"""

from __future__ import annotations

from node.errors import NodeError


class GraderFault(NodeError):
    """This machine cannot grade; the verdict is indeterminate. `code`: `python_version`."""

    code = "grader_fault"


class BadAnswer(NodeError):
    """No completion can match this expected answer. `code`:

    empty_answer     it has no text
    long_answer      it is longer than a grader reads
    bad_choice       it is not one of the letters
    bad_number       it is not one number
    bad_json         it is not JSON within the limits
    bad_regex        it is outside the language of patterns, or too large
    bad_cases        it is no list of test cases
    """

    code = "bad_answer"
