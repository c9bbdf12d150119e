"""The environment that runs answers: the same problems everywhere, and right answers earn one."""

from __future__ import annotations

import pytest
from sandboxing import expressions, functions, needs_sandbox

from node.environments import EnvironmentFault, load_environment
from node.environments.code import CASES, LIST_OPERATIONS, MAX_CODE_BYTES, NUMBER_OPERATIONS, Code
from node.policy.models.tiny_llama import UNK, make_tokenizer
from node.protocol.run import EnvironmentSpec

LAST = 2**63 - 1
FUNCTION = functions(steps=4)

GOLDEN_FUNCTION = """\
Write a Python function f(v) that takes a list of integers and does the following, step by step:
1. sort the list in ascending order;
2. move the first 9 numbers to the end;
3. square each number;
4. move the first 9 numbers to the end;
Then it returns the list. It must neither read nor print anything.
Think first, end your thoughts with </think>, and then give the function in a block between ```python and ```.
"""


def test_golden_prompts_do_not_change_between_releases():
    """Two releases that disagree here reject each other's honest rollouts as wrong_prompt."""
    assert [expressions().problem(index).prompt for index in (0, 1, 2**32, LAST)] == [
        "Q:py add 3, mod 9\nA:",
        "Q:py from 3, times 9\nA:",
        "Q:py from 8, square\nA:",
        "Q:py times 4, add 3\nA:",
    ]
    assert expressions(1).problem(0).prompt == "Q:py add 3\nA:"
    assert FUNCTION.problem(0).prompt == GOLDEN_FUNCTION


def test_golden_cases_do_not_change_between_releases():
    """Two releases that disagree here give other rewards, and an auditor calls the operator a liar."""
    problem = expressions().problem(0)
    assert (problem.data["inputs"], problem.data["outputs"]) == (
        [1, -11, 3, 7, -21, 18, -26, -8],
        [4, 1, 6, 1, 0, 3, 4, 4],
    )
    problem = FUNCTION.problem(0)
    assert (problem.data["inputs"][:3], problem.data["outputs"][:3]) == (
        [[], [-8, -25, -23, 25, 8, -28, -7, 17, -33, 14, -32], [24, -47, -19, -4]],
        [[], [64, 196, 289, 625, 1089, 1024, 784, 625, 529, 64, 49], [2209, 361, 16, 576]],
    )


def test_every_operation_occurs_with_as_many_steps_as_asked():
    told = "".join(expressions().problem(index).prompt for index in range(300))
    assert all(operation.told.partition(" {n}")[0] in told for operation in NUMBER_OPERATIONS)
    told = "".join(functions().problem(index).prompt for index in range(300))
    assert all(operation.told.partition("{n}")[0] in told for operation in LIST_OPERATIONS)
    assert expressions(6).problem(1).prompt.count(",") == 5
    assert "\n6. " in functions(6).problem(1).prompt


def test_values_fit_into_64_bits_at_every_difficulty():
    """The sandbox writes no larger ones: nobody could be right."""
    for index in range(2000):
        for value in expressions(6).problem(index).data["outputs"]:
            assert abs(value) < 2**63
        for values in functions(6).problem(index).data["outputs"]:
            assert all(abs(value) < 2**63 for value in values)


def test_a_character_model_can_read_the_question_and_write_the_answer():
    tokenizer = make_tokenizer()
    for index in range(200):
        problem = expressions(6).problem(index)
        assert UNK not in tokenizer.encode(problem.prompt + problem.data["answer"])
        assert len(tokenizer.encode(problem.prompt)) <= 128
        assert len(tokenizer.encode(f"<think></think>{problem.data['answer']}")) < 48


def test_no_constant_answers_more_than_a_few_problems():
    """Else a policy would learn to say it, whatever is asked."""
    numbers = [expressions(3).problem(index).data["outputs"] for index in range(1000)]
    assert sum(len(set(values)) == 1 for values in numbers) < 30
    lists = [functions(3).problem(index).data["outputs"] for index in range(1000)]
    assert sum(not any(values) for values in lists) < 60
    assert (
        sum(function.data["inputs"] == function.data["outputs"] for function in map(functions(3).problem, range(1000)))
        < 30
    )


@needs_sandbox
@pytest.mark.parametrize("source", [expressions(1), expressions(4), functions(1), FUNCTION])
def test_the_answer_that_comes_with_a_problem_is_right(source):
    for index in range(15):
        problem = source.problem(index)
        assert source.reward(problem, f"<think>so</think>\n{problem.data['answer']}\n") == 1.0
        assert source.reward(problem, problem.data["answer"]) == 0.0
        assert source.reward(problem, f"</think>{problem.data['answer']}</think>") == 0.0


@needs_sandbox
def test_another_way_to_write_it_is_as_good_and_another_value_is_not():
    source = expressions()
    problem = source.problem(0)
    answer = problem.data["answer"]
    assert source.reward(problem, f"</think>(lambda y: {answer.replace('x', 'y')})(x)") == 1.0
    assert source.reward(problem, f"</think>[{answer}][0]  # so") == 1.0
    for wrong in (f"{answer}+1", f"float({answer})", f"str({answer})", f"[{answer}]", f"{answer},", "x", "", "1 +"):
        assert source.reward(problem, f"</think>{wrong}") == 0.0


@needs_sandbox
def test_an_answer_that_is_right_for_most_cases_earns_nothing():
    source = functions()
    problem = source.problem(0)
    body = problem.data["answer"].removeprefix("```python\n").removesuffix("```")
    assert source.reward(problem, f"</think>```python\n{body}```") == 1.0
    assert source.reward(problem, f"</think>```python\n{body}g = f\ndef f(v): return g(v) if v else None\n```") == 0.0


@needs_sandbox
def test_the_last_block_counts_and_text_around_it_does_not():
    problem = FUNCTION.problem(2)
    answer = problem.data["answer"]
    assert FUNCTION.reward(problem, f"</think>First:\n```python\nno\n```\nthen:\n{answer}\nDone.") == 1.0
    assert FUNCTION.reward(problem, f"</think>{answer}\n```python\nno\n```") == 0.0
    assert FUNCTION.reward(problem, f"</think>{answer.removesuffix('```')}") == 0.0
    assert FUNCTION.reward(problem, f"</think>{answer.replace('python', '')}") == 0.0


@needs_sandbox
def test_code_may_print_and_import_what_is_the_same_everywhere():
    problem = FUNCTION.problem(2)
    busy = "import math, re, itertools, collections, functools, heapq, string\nprint('hello' * 1000)\n"
    answer = problem.data["answer"].replace("```python\n", f"```python\n{busy}")
    assert FUNCTION.reward(problem, f"</think>{answer}") == 1.0


def test_an_answer_that_is_no_code_costs_no_process(monkeypatch):
    """Without bubblewrap these would raise."""
    monkeypatch.setenv("PATH", "")
    for completion in (
        "",
        "x",
        "<think>x",
        "</think>",
        "</think> \n",
        "</think>\ud800",
        "</think>" + "1" * (MAX_CODE_BYTES + 1),
    ):
        assert expressions().reward(expressions().problem(0), completion) == 0.0
    assert FUNCTION.reward(FUNCTION.problem(0), "</think>def f(v): return v") == 0.0


@pytest.mark.parametrize(
    "arguments", [{"steps": 0}, {"steps": 7}, {"form": "program"}, {"python": "3"}, {"python": 3.11}, {"stpes": 1}]
)
def test_a_wrong_argument_is_refused(arguments):
    with pytest.raises(EnvironmentFault) as caught:
        load_environment(EnvironmentSpec(name="code", arguments=arguments))
    assert caught.value.code == "bad_arguments"
    assert isinstance(load_environment(EnvironmentSpec(name="code")), Code)


def test_a_problem_has_as_many_cases_as_it_says_and_the_empty_list_is_one():
    for index in range(50):
        assert len(expressions().problem(index).data["inputs"]) == CASES
        inputs = functions().problem(index).data["inputs"]
        assert len(inputs) == CASES
        assert inputs[0] == []
