"""The papers' teams: each reward by hand, who acts when, and what no text can get away with. No model is needed."""

import copy
import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from envs import (BM25, TASKS, Code, CodeProblem, Ensemble, Passage, PlanPath, Problem, Search, SearchProblem, Sokoban, Sudoku, completions,
                  generate_code_problem, last_list, last_tag, load_code_problems, load_corpus, normal_text, play, read_test, run_tests, verdict_in)


def started(env, seed=0):
    env.reset(Random(seed))
    return env


def program(answer):
    return f"```python\nprint({answer!r})\n```"


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, answer", [
    ('I go up. #### ["U", "R"]', ["U", "R"]), ("#### ['U', 'R'] and that is [all].", ["U", "R"]), ("#### [U, R,D]", ["U", "R", "D"]),
    ('#### ["L"]\nNo, better:\n#### ["R"]\nDone.', ["R"]), ("#### Answer: [U]", ["U"]), ("####\n[[1, 2],\n [3, 4]]", [[1, 2], [3, 4]]), ("#### []", []),
    ('["U", "R"]', None), ("#### U, R", None), ("#### [U, R", None), ("#### [open('x')]", None), ("#### [1 + 1]", None), ("#### {'a': [1]}", [1]),
    ("#### " + "[" * 900 + "]" * 900, None), ("#### [9**9**9]", None), ("", None)])
def test_the_list_behind_the_last_marker(text, answer):
    assert last_list(text, "####") == answer


def test_of_a_programs_output_the_last_list_counts():
    assert last_list("[1]\nActions: ['U', 'D']\n") == ["U", "D"]
    assert last_list("[[1, 2],\n [3, 4]]\nok") == [[1, 2], [3, 4]]
    assert last_list("none found") is None


def test_tags_and_verdicts():
    assert last_tag("<answer>a</answer> no: <answer> b </answer>", "answer") == "b"
    assert last_tag("</answer><answer>", "answer") is None and last_tag("<answer></answer>", "answer") is None
    assert verdict_in("<verify>no</verify> ... <verify> YES </verify>", "yes", "no") == "yes"
    assert verdict_in("yes", "yes", "no") is None and verdict_in("<verify>maybe</verify>", "yes", "no") is None


HOSTILE = ["[", "]", "[U,", "#### [", "####", "<verify>", "<answer>", "</answer>", "**Test Output:**", "**Test Input:**", "```", "```python\n", "a", " ", "\n", "(", "1,",
           "\\boxed{", "{", "}", "\\", "\ud800", "\0", "<verify>yes", "assert f(", "-", "'", '"', "#"]


@pytest.mark.parametrize("size", [1000, 100_000])
@pytest.mark.parametrize("read", [lambda t: last_list(t, "####"), last_list, lambda t: last_tag(t, "answer"), lambda t: verdict_in(t, "yes", "no"),
                                  lambda t: read_test(CodeProblem("", "", ()), t), lambda t: read_test(CodeProblem("", "", (), "f"), t)],
                         ids=["list", "output", "tag", "verdict", "test", "assert"])
def test_readers_take_any_text_within_ten_milliseconds(read, size):
    rng, slowest = Random(0), 0.0
    texts = [piece * (size // len(piece)) for piece in HOSTILE] + ["####" + piece * (size // len(piece)) for piece in HOSTILE]
    texts += ["".join(rng.choices(HOSTILE, k=size // 3)) for _ in range(20)]
    for text in texts:
        took = []
        for _ in range(2):              # the quicker of two: the machine may be busy
            start = time.process_time()
            read(text)
            took.append(time.process_time() - start)
        slowest = max(slowest, min(took))
    assert slowest < 0.01


# -- plan-path --------------------------------------------------------------------------------------------------------


def path(turns=4, **settings):
    """P.#
       .#.      the goal is four steps away: down, down, right, right
       ..G"""
    env = started(PlanPath(size=3, turns=turns, **settings))
    env.walls, env.state, env.goal = frozenset({(0, 2), (1, 1)}), (0, 0), (2, 2)
    env.start_distance = env.distance()
    return env


@pytest.mark.parametrize("text, team, local, valid", [
    ("#### [D, D, R, R]", 1, 1, True), ("#### [D, D, R, R, U, U]", 1, 1, True), ("#### [D, D]", .5, 1, True), ("#### [R]", 0, .2, True),
    ("#### [U, D, D]", .5, .1, True), ("#### [D, L, D]", .5, .9, True), ("#### []", 0, .1, True), ("#### [X]", 0, 0, False), ("down, down", 0, 0, False)])
def test_what_a_planner_earns(text, team, local, valid):
    """The way is 4 long. Local: .1 a list + .1 every move possible + .8 the first move lies on a shortest way."""
    env = path(single_agent=True)
    reward = env.step("planner", text)
    assert (reward.team, round(reward.local, 9), reward.valid) == (team, local, valid)
    assert env.success() == (team == 1) and (env.acting() == ()) == env.success()


@pytest.mark.parametrize("text, local, valid", [
    (program(["D", "D", "R", "R"]), 1, True), (program(["D", "D"]), .6, True), (program(["R"]), .2, True), (program("no list"), .1, True),
    ("```python\nprint([\n```", 0, False), ("[D, D, R, R]", 0, False), ("```python\nprint(['D'])\n1/0\n```", .1, True)])
def test_what_a_path_tool_earns_and_that_it_moves_nothing(text, local, valid):
    """.1 it builds + .1 it prints a list + .8 the share of the way that this list would win. Going back wins 0, not less."""
    env = path()
    reward = env.step("tool", text)
    assert (reward.team, round(reward.local, 9), reward.valid) == (0, local, valid)
    assert env.state == (0, 0) and env.acting() == ("planner",)


def test_the_present_position_is_shown_and_the_planner_sees_the_tool():
    env = path()
    assert "P.#\n.#.\n..G" in env.observe("tool")
    env.step("tool", program(["D", "L"]))
    seen = env.observe("planner")
    assert "print(['D', 'L'])" in seen and "It printed: ['D', 'L']" in seen and "The answer read from that: ['D', 'L']" in seen
    env.step("planner", "#### [D, D]")
    assert env.turn == 1 and env.acting() == ("tool",) and "..#\n.#.\nP.G" in env.observe("tool") and "turn 2 of at most 4" in env.observe("tool")
    env.step("tool", "no program")
    assert "They" not in env.observe("planner") and "It printed: no python block" in env.observe("planner")     # nothing of turn 1 is left


def test_a_play_of_the_path_ends_after_the_turns():
    env = path(turns=2, single_agent=True)
    env.step("planner", "#### [D]"), env.step("planner", "#### [U]")
    assert env.acting() == () and env.turn == 2 and not env.success()


def test_a_fifth_of_the_cells_are_walls_and_every_goal_can_be_reached():
    envs = [started(PlanPath(), seed) for seed in range(200)]
    assert 0.19 < np.mean([len(env.walls) / 100 for env in envs]) < 0.25
    assert 7 < np.mean([env.start_distance for env in envs]) < 10           # the official generator's mean is 8.26


# -- sokoban ----------------------------------------------------------------------------------------------------------


def sokoban(board, **settings):
    """An env with this board, one line a row."""
    env = started(Sokoban(size=5, **settings))
    cells = {(r, c): mark for r, row in enumerate(board.split()) for c, mark in enumerate(row)}
    env.floor = frozenset(cell for cell, mark in cells.items() if mark != "#")
    env.goals = frozenset(cell for cell, mark in cells.items() if mark in ".*+")
    (player,) = (cell for cell, mark in cells.items() if mark in "@+")
    env.state = player, frozenset(cell for cell, mark in cells.items() if mark in "$*")
    env.boxes = len(env.state[1])
    env.start_distance = env.distance()
    return env


CORRIDOR = "##### #---# #@$-# #--.# #####"      # right, then around to push the box down


@pytest.mark.parametrize("text, team, local", [
    ("#### [R, U, R, D]", 1, 1), ("#### [R]", 0, 1), ("#### [R, R]", 0, .9), ("#### [L]", 0, .9), ("#### []", 0, .1), ("none", 0, 0),
    ("#### [D, R, U]", 0, .2)])
def test_what_a_sokoban_planner_earns(text, team, local):
    """.1 a list + .1 every move possible + .8 the level can still be solved: [D, R, U] pushes the box to the top, for ever."""
    env = sokoban(CORRIDOR, single_agent=True)
    reward = env.step("planner", text)
    assert (reward.team, round(reward.local, 9)) == (team, local)


def test_of_two_boxes_one_home_is_half():
    env = sokoban("##### #@$.# #---# #-$.# #####", single_agent=True)
    assert env.step("planner", "#### [R]").team == 0.5 and not env.success()
    assert env.step("planner", "#### [L, D, D, R]").team == 1 and env.success()


def test_a_sokoban_tool_earns_the_share_of_the_boxes_distance():
    env = sokoban(CORRIDOR)
    assert env.step("tool", program(["R"])).local == pytest.approx(0.1 + 0.1 + 0.8 * 1 / 2)
    assert env.picture().split() == CORRIDOR.split()


@pytest.mark.parametrize("size, boxes", [(5, 1), (6, 1), (7, 2), (8, 2)])
def test_levels_can_be_solved_and_are_not_solved_yet(size, boxes):
    for seed in range(20):
        env = started(Sokoban(size=size, boxes=boxes), seed)
        assert not env.success() and env.solution() and len(env.state[1]) == len(env.goals) == boxes and env.state[0] not in env.state[1]


# -- sudoku -----------------------------------------------------------------------------------------------------------


FULL = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]


def sudoku(**settings):
    """Two cells of the first row and one of the second are empty."""
    env = started(Sudoku(**settings))
    env.full, env.clues = FULL, [[1, 0, 0, 4], [3, 4, 0, 2], *FULL[2:]]
    env.grid = copy.deepcopy(env.clues)
    return env


@pytest.mark.parametrize("grid, team, local", [
    (FULL, 1, .1 + .1 + .8 * 3 / 16), ([[1, 2, 0, 4], [3, 4, 0, 2], *FULL[2:]], 0, .1 + .1 + .8 * 1 / 16),
    ([[1, 3, 2, 4], [3, 4, 1, 2], *FULL[2:]], 0, .1), ([FULL[1], FULL[0], FULL[3], FULL[2]], 0, .1), (FULL[:3], 0, 0), ([[5, 2, 3, 4], *FULL[1:]], 0, 0),
    ([[True, 2, 3, 4], *FULL[1:]], 0, 0), ("1234", 0, 0)])
def test_what_a_sudoku_reasoner_earns(grid, team, local):
    """.1 a grid + .1 legal + .8 newly filled cells / 16. Another full grid, legal but with other clues, wins nothing."""
    env = sudoku(single_agent=True)
    reward = env.step("reasoner", f"#### {grid}")
    assert (reward.team, round(reward.local, 9)) == (team, round(local, 9)) and env.success() == (team == 1)


def test_an_illegal_grid_is_refused_and_a_partial_one_is_built_upon():
    env = sudoku(single_agent=True)
    env.step("reasoner", f"#### {[[1, 3, 2, 4], *env.clues[1:]]}")
    assert env.grid == env.clues
    env.step("reasoner", f"#### {[[1, 2, 0, 4], *env.clues[1:]]}")
    assert "1 2 0 4" in env.observe("reasoner")
    assert env.step("reasoner", f"#### {FULL}").local == pytest.approx(.2 + .8 * 2 / 16) and env.success()


def test_a_sudoku_tool_earns_the_share_of_sane_cells():
    env = sudoku()
    assert env.step("tool", program(FULL)).local == pytest.approx(1) and env.grid == env.clues
    env.step("reasoner", "")
    # 3, 2 in the first row repeat the 3 of its box and of column 1, the 2 of its box and of column 2: 2 + 3 + 1 cells
    wrong = [[1, 3, 2, 4], [3, 4, 1, 2], *FULL[2:]]
    assert env.step("tool", program(wrong)).local == pytest.approx(.2 + .8 * (16 - len(env.faults(wrong))) / 16) and len(env.faults(wrong)) == 6


@pytest.mark.parametrize("size, n", [(4, 30), (9, 3)])
def test_every_sudoku_has_one_solution_and_no_prompt_shows_it(size, n):
    start = time.process_time()
    envs = [started(Sudoku(size=size), seed) for seed in range(n)]
    assert (time.process_time() - start) / n < 1
    for env in envs:
        assert list(completions(env.clues)) == [env.full] and env.filled() < size**2
        env.step("tool", "nothing")
        for agent in ("tool", "reasoner"):
            env.queue = [agent]
            assert env.read(last_list(env.observe(agent))) is None


def test_there_are_288_small_sudokus_and_the_splits_do_not_meet():
    assert len(list(completions([[0] * 4 for _ in range(4)]))) == 288
    seen = {split: {str(started(Sudoku(split=split), seed).full) for seed in range(200)} for split in ("train", "eval")}
    assert not seen["train"] & seen["eval"] and len(seen["eval"]) > 30


# -- code -------------------------------------------------------------------------------------------------------------


def test_block(given, printed):
    return f"**Test Input:**\n```\n{given}\n```\n**Test Output:**\n```\n{printed}\n```"


test_block.__test__ = False
DOUBLE = CodeProblem("Read a number. Print it twice as large.", "print(2 * int(input()))", (("1", "2"), ("5", "10"), ("0", "0"), ("-3", "-6")))
RIGHT, TWO_MORE, CRASHES = (f"```python\nprint({text})\n```" for text in ("int(input()) * 2", "int(input()) + 2", "input() + 2"))


def code(problem=DOUBLE, **settings):
    return started(Code(problems=[problem], **settings))


@pytest.mark.parametrize("text, share, local, valid", [
    (RIGHT, 1, 1, True), (TWO_MORE, 0, .2, True), ("```python\nprint(max(int(input()) * 2, 0))\n```", .75, .8, True), (CRASHES, 0, .1, True),
    ("```python\nassert 0\n```", 0, .1, True), ("```python\nprint(\n```", 0, 0, False), ("print(2)", 0, 0, False)])
def test_what_a_coder_earns(text, share, local, valid):
    """.1 builds + .1 runs + .8 the share of the four hidden tests that pass; team the same share."""
    reward = code().step("coder", text)
    assert (reward.team, round(reward.local, 9), reward.valid) == (share, local, valid)


@pytest.mark.parametrize("coder", [RIGHT, TWO_MORE, "nothing"])
@pytest.mark.parametrize("test, local, valid", [(test_block(7, 14), 1, True), (test_block(7, 9), .2, True), ("It reads 7.", 0, False), (test_block("x", 1), .2, True)])
def test_a_tester_is_paid_for_its_test_whatever_the_code(coder, test, local, valid):
    env = code()
    env.step("coder", coder)
    reward = env.step("tester", test)
    assert (reward.local, reward.valid) == (local, valid) and reward.team == (coder == RIGHT)


@pytest.mark.parametrize("coder, test, over, success", [
    (RIGHT, test_block(7, 14), True, True), (RIGHT, test_block(7, 9), False, True), (TWO_MORE, test_block(7, 9), True, False), (RIGHT, "", False, True),
    ("no code", "**Test Input:** **Test Output:**", False, False)])
def test_the_code_play_ends_when_code_and_test_agree(coder, test, over, success):
    env = code()
    assert env.acting() == ("coder", "tester")
    env.step("coder", coder), env.step("tester", test)
    assert (env.acting() == ()) == over and env.success() == success and env.turn == 1


def test_a_mismatch_is_shown_to_both_and_what_agrees_is_this_turns():
    env = code(turns=3)
    env.step("coder", TWO_MORE)
    assert env.observe("tester") == code().observe("tester")        # at once: it does not see this turn's program
    env.step("tester", test_block(7, 14))
    for agent in env.acting():
        seen = env.observe(agent)
        assert "int(input()) + 2" in seen and test_block(7, 14) in seen and "The program gave: 9" in seen
    env.step("coder", RIGHT), env.step("tester", test_block(7, 9))
    assert env.acting() and env.observe("coder").count("The program gave") == 2


EVEN = CodeProblem('def even(n):\n    """Is n even?"""\n', "    return n % 2 == 0\n", (("def check(candidate):\n    assert candidate(2)\n    assert not candidate(3)\ncheck(even)", ""),), "even")


@pytest.mark.parametrize("text, passes", [
    ("def even(n):\n    return n % 2 == 0", True), ("    return n % 2 == 0", True), ("def even(n): return True", False), ("exit(0)", False),
    ("import os; os._exit(0)", False), ("import sys\ntry:\n    even(2)\nfinally:\n    print('passed'); sys.exit(0)", False),
    ("def check(candidate): pass", False), ("print('ok')", False), ("from __future__ import annotations\ndef even(n): return n % 2 == 0", True),
    ("import sys, os\nprint([c for c in sys._getframe().f_code.co_consts if isinstance(c, str)][-1], flush=True)\nos._exit(0)", False)])
def test_a_function_passes_only_if_the_asserts_behind_it_are_reached(text, passes):
    ((passed, _),) = run_tests(EVEN, [(text, test) for test in EVEN.tests])
    assert passed == passes


@pytest.mark.parametrize("line, local", [
    ("assert even(4) == True", 1), ("assert even(n=4) is True, 'why'", 1), ("assert even(3) == True", .2), ("assert even(4)", 0), ("assert even(4) or True", 0),
    ("assert even(4) == even(4)", 0), ("assert odd(4) == True", 0), ("assert True", 0), ("assert even(4) == 99, print()", 0), ("assert even(4) == True\nassert even(6) == True", 0), ("import os", 0), ("assert (", 0)])
def test_for_a_function_the_tester_writes_one_assert_that_says_what_is_right(line, local):
    env = code(EVEN)
    env.step("coder", "```python\ndef even(n): return n % 2 == 0\n```")
    assert env.step("tester", f"```python\n{line}\n```").local == local
    assert read_test(EVEN, line) is None         # no block


def test_generated_programs_pass_their_own_tests_and_the_splits_do_not_meet():
    for level in (1, 3, 5):
        problems = {split: [generate_code_problem(Random(seed), level, split) for seed in range(40)] for split in ("train", "eval")}
        assert not {p.question for p in problems["train"]} & {p.question for p in problems["eval"]}
        for problem in problems["train"][:4]:
            assert all(passed for passed, _ in run_tests(problem, [(problem.solution, test) for test in problem.tests]))
            assert problem.question.count(".") == level + 2


def test_programming_problems_in_the_shapes_that_people_have(tmp_path):
    rows = [{"problem": "Double it.", "tests": [{"input": "1\n", "output": "2\n"}], "solution": "print(2 * int(input()))"},
            {"question": "Double it.", "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}), "solutions": json.dumps(["print(2 * int(input()))"])},
            {"prompt": EVEN.question, "entry_point": "even", "test": "def check(candidate):\n    assert candidate(2)", "canonical_solution": EVEN.solution}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = load_code_problems(tmp_path / "p.jsonl")
    assert [p.function for p in problems] == ["", "", "even"]
    assert all(run_tests(p, [(p.solution, p.tests[0])])[0][0] for p in problems)
    for broken, says in (({"problem": "x"}, 'needed are "tests"'), (rows[0] | {"tests": [1]}, 'needed are "tests"'), (rows[2] | {"test": ""}, "needed with entry_point"), (rows[0] | {"problem": ""}, "no question"),
                         (rows[0] | {"tests": {"inputs": 5, "outputs": [1]}}, "inputs and outputs are lists"),
                         (rows[0] | {"tests": {"inputs": [1, 2], "outputs": [1]}}, "inputs and outputs are lists"), (rows[0] | {"tests": {"inputs": [1], "outputs": [1], "fn_name": "f"}}, "inputs and outputs are lists"), (rows[0] | {"solution": " "}, 'needed are "tests"'), (rows[2] | {"test": "def check("}, "its test, with check\\(even\\)"), (rows[2] | {"entry_point": "f("}, "its test")):
        (tmp_path / "b.jsonl").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=f"b.jsonl, line 1: {says}"):
            load_code_problems(tmp_path / "b.jsonl")


# -- search -----------------------------------------------------------------------------------------------------------


CORPUS = BM25([Passage("Ann", "The boss of Ann is Ben."), Passage("Ben", "The city of Ben is Rome."), Passage("Cid", "The friend of Cid is Ann."), Passage("Dan", "Nothing.")])
ROME = SearchProblem("What is the city of the boss of Ann?", ("Rome", "Roma"), (0, 1), ("boss of Ann", "city of Ben"))
NO, YES = "<verify>no</verify>", "<verify>yes</verify>"


def search(turns=4, **settings):
    return started(Search(problems=[ROME], corpus=CORPUS, turns=turns, **settings))


def test_bm25_by_hand():
    """Three passages of 2, 2 and 4 words, mean 8/3. "red" is in two of three: idf = ln(1 + 1.5/2.5); tf = 1 both times."""
    index = BM25([Passage("", "red car"), Passage("", "blue car"), Passage("", "red red fast boat")])
    idf = np.log(1 + 1.5 / 2.5)
    first = idf * 1 * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 2 / (8 / 3)))
    third = idf * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 4 / (8 / 3)))
    where, scores = index.scores["red"]
    assert where.tolist() == [0, 2] and np.allclose(scores, [first, third])
    assert index.search("RED!") == [2, 0] and index.search("nothing here") == [] and index.search("car", k=1) == [0] and index.search("") == []


def test_of_equals_the_first_is_found_in_every_process():
    """A set of words has another order in each process, and sums of floats differ with the order."""
    assert BM25([Passage("", "same words here")] * 500).search("same words") == [0, 1, 2]
    script = ("from random import Random; from envs import generate_search_problem\n"
              "for seed in range(40):\n    problem, index = generate_search_problem(Random(seed), 'train')\n"
              "    print(index.search(' '.join([problem.question, *problem.queries])))")
    found = {subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent,
                            env={"PYTHONHASHSEED": seed}).stdout for seed in ("0", "1", "2")}
    assert len(found) == 1 and len(found.pop().splitlines()) == 40


def test_a_hundred_thousand_passages_are_searched_in_fifty_milliseconds():
    rng = Random(0)
    vocabulary = [f"w{int(rng.paretovariate(0.6)) % 50_000}" for _ in range(100_000)]
    index = BM25([Passage(f"t{i}", " ".join(vocabulary[(i * 7 + j * 13) % 100_000] for j in range(20))) for i in range(100_000)])
    took = []
    for i in range(20):
        query = " ".join(rng.choices(vocabulary, k=10))
        start = time.process_time()
        hits = index.search(query)
        took.append(time.process_time() - start)
        assert len(hits) == 3
    assert sorted(took)[10] < 0.05


def test_the_verifier_sends_to_search_then_to_the_answer():
    env = search()
    assert env.acting() == ("verifier",)
    assert env.step("verifier", NO).local == 1 and env.acting() == ("search",)          # true: nothing is found yet
    reward = env.step("search", "<search>boss</search>")
    assert reward.local == 1 and reward.team == 0 and env.turn == 1 and env.acting() == ("verifier",)
    assert "<search>boss</search>" in env.observe("verifier") and "Doc 1 (Ann): The boss of Ann is Ben." in env.observe("verifier")
    assert env.step("verifier", NO).local == 1
    assert env.step("search", "<search>Ann boss</search>").local == 0                   # nothing new
    assert env.step("verifier", NO).local == 1 and env.step("search", "<search>city</search>").local == 1
    assert env.step("verifier", "I cannot say").local == 0 and env.acting() == ("answer",)        # no verdict counts as yes
    assert env.step("answer", "<answer>The Rome!</answer>").team == 1 and env.success() and env.acting() == () and env.turn == 4


def test_a_verdict_is_true_when_all_passages_are_found():
    env = search()
    assert env.step("verifier", YES).local == 0 and env.acting() == ("answer",)
    env = search()
    env.history = [("q", [0, 1])]
    assert copy.deepcopy(env).step("verifier", NO).local == 0 and env.step("verifier", YES).local == 1


def test_no_on_the_last_turn_ends_with_nothing():
    env = search(turns=1)
    env.step("verifier", NO)
    assert env.acting() == () and not env.success() and env.turn == 1


def test_a_text_that_cannot_be_read_costs_the_turn():
    env = search(turns=2)
    env.step("verifier", NO)
    assert not env.step("search", "boss of Ann").valid and env.turn == 1 and env.history == []
    env.step("verifier", YES)
    assert not env.step("answer", "Rome").valid and env.acting() == () and env.turn == 2 and not env.success()


def test_a_single_agent_searches_and_answers_as_it_likes():
    env = search(single_agent=True)
    assert env.agents == env.acting() == ("answer",)
    assert env.step("answer", "<search>boss of Ann</search>").valid and env.turn == 1 and env.acting() == ("answer",)
    assert env.step("answer", "<answer>roma</answer>").team == 1 and env.acting() == ()


@pytest.mark.parametrize("a, b", [("The U.S.A.", "usa"), ("a  Big\nApple", "big apple"), ("1,000", "1000"), ("Theatre", "theatre")])
def test_exact_match_after_the_usual_normalisation(a, b):
    assert normal_text(a) == normal_text(b) != normal_text(a + " x")


def test_an_answer_of_nothing_but_articles_or_points_is_itself():
    """Else "the" would be right where blood group "A" is asked for."""
    env = started(Search([SearchProblem("Which blood group?", ("A",))], BM25([Passage("", "Her blood group is a secret. Anna")])))
    env.history = [("blood", [0])]
    assert not env.complete()                               # "Anna" does not hold the answer
    env.step("verifier", "<verify>yes</verify>")
    assert env.step("answer", "<answer>the</answer>").team == 0 and not env.success()
    assert normal_text("A") == "a" and normal_text("...") == "..." and normal_text("The a") == "the a"


def test_questions_and_passages_from_files(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"title": "Ann", "text": "Boss: Ben."}\n{"title": "Ben", "text": "Rome."}')
    (tmp_path / "q.jsonl").write_text('{"question": "Where?", "answer": "Rome", "supporting_titles": ["Ben", "Lost"]}\n{"question": "Who?", "answer": ["Ben", "B."], "supporting_titles": []}')
    env = Search(corpus=load_corpus(tmp_path / "corpus.jsonl"))
    with pytest.warns(UserWarning, match="1 supporting titles are not in the corpus"):
        there, who = env.load(tmp_path / "q.jsonl")
    assert there.support == (1, -1) and who.support == () and who.answers == ("Ben", "B.")
    env = started(Search(problems=[who], corpus=env.corpus))
    assert not env.complete()
    env.step("verifier", "<verify>no</verify>")
    assert env.step("search", "<search>boss</search>").local == 1
    assert env.complete()                                   # no titles are named: a found passage holds the answer
    with pytest.raises(ValueError, match="give --corpus FILE"):
        Search().load(tmp_path / "q.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"question": "Who?", "answer": "Ben", "supporting_titles": "Ben"}')
    with pytest.raises(ValueError, match="bad.jsonl, line 1: supporting_titles is a list of titles, not str"):
        env.load(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match="questions need passages"):
        Search(problems=[who])
    (tmp_path / "bad.jsonl").write_text('{"title": "Ann"}')
    with pytest.raises(ValueError, match='bad.jsonl, line 1: no "text"; found title'):
        load_corpus(tmp_path / "bad.jsonl")


# -- the ensemble -----------------------------------------------------------------------------------------------------


def test_helpers_work_at_once_and_the_judge_has_the_last_word():
    env = started(Ensemble(2, 1, problems=[Problem("What is 47 + 38?", ("85",))]))
    assert env.acting() == ("reasoner1", "reasoner2", "tool1")
    said = {"reasoner1": r"\boxed{75}", "reasoner2": r"\boxed{85}", "tool1": "```python\nprint(47 + 38)\n```"}
    rewards = {agent: env.step(agent, text) for agent, text in said.items()}
    assert {agent: (r.team, round(r.local, 9)) for agent, r in rewards.items()} == {"reasoner1": (0, .2), "reasoner2": (0, 1), "tool1": (0, 1)}
    assert env.acting() == ("judge",) and env.turn == 0
    seen = env.observe("judge")
    assert "reasoner1. The reasoner's solution: \\boxed{75}\nThe reasoner's answer: 75" in seen and "reasoner2" in seen and "tool1. The tool agent's program:\nprint(47 + 38)" in seen
    reward = env.step("judge", r"\boxed{85}")
    assert (reward.team, reward.local) == (1, 1) and env.success() and env.acting() == () and env.turn == 1


def test_an_ensemble_comes_from_its_numbers():
    assert TASKS["math"](reasoners=1, tools=3).agents == ("reasoner1", "tool1", "tool2", "tool3", "judge")
    assert TASKS["math"]().agents == ("reasoner", "tool")
    with pytest.raises(ValueError, match="--turns 3: this team has one turn"):
        TASKS["math"](reasoners=2, turns=3)
    with pytest.raises(ValueError, match="no single agent"):
        TASKS["math"](reasoners=2, single_agent=True)
    rewards, env = play(started(TASKS["math"](reasoners=2)), lambda env, agent: env.solve(agent))
    assert [agent for agent, _ in rewards] == ["reasoner1", "reasoner2", "judge"] and env.success()
