"""The tasks: what is right, what a text earns, and what a hostile text cannot do. No model is needed."""

import copy
import json
import os
import random
import subprocess
import sys
import time
from fractions import Fraction
from random import Random

import pytest
from envs import (LEVELS, MAX_ANSWER, TASKS, Math, MathVerify, Problem, Reward, expression, final_answer, generate_problem,
                  held_out, last_boxed, load_problems, normal_form, play, python_block, same_answer, to_number, worked)

TEAMS = [(task, single) for task in TASKS for single in (False, True)]


# -- grading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, content", [
    (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),            # nested braces
    (r"\boxed{3}, no: \boxed{4}.", "4"),                    # the last one counts
    (r"\boxed{3} and \boxed{4", "3"),                       # ... of those that are closed
    (r"\boxed {5}", "5"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),                     # escaped braces are text
    (r"\boxed{\boxed{7}}", "7"),
    (r"} } \boxed{8}", "8"),
    (r"\boxed{}", None), (r"\boxed{ }", None), ("85", None), ("", None), (r"\boxed 85", None), (r"\boxed{", None),
    (r"\boxed{" + "1" * (MAX_ANSWER + 1) + "}", None)])
def test_last_boxed(text, content):
    assert last_boxed(text) == content


SAME = [("1,000", "1000"), ("1000.0", "1000"), ("27.0", "27"), (".5", "0.5"), ("5.", "5"), ("+5", "5"), ("007", "7"), ("1e3", "1000"),
        ("1/2", "0.5"), (r"\frac12", "1/2"), (r"\frac{1}{2}", "0.5"), (r"\dfrac{1}{2}", r"\tfrac12"), (r"\frac 59", "5/9"), ("2/4", "1/2"),
        (r"-\frac{35}{9}", "-35/9"), (r"\frac{-1}{2}", "-0.5"), (r"2\frac{1}{2}", "2.5"), ("2 1/2", "5/2"), (r"-1\frac12", "-1.5"),
        (r"\frac{270}7\text{ degrees}", "270/7"), (r"120^\circ", "120"), (r"120^{\circ}", "120"), ("120°", "120 degrees"),
        (r"\$32,\!348", "32348"), ("$36", "36 dollars"), (r"11,\! 111,\! 111,\! 100", "11111111100"), ("1{,}000", "1000"), ("£5", "5"),
        (r"5\text{ cm}", "5"), (r"50\%", "50"), ("50%", "50 percent"), ("x = 5", "5"), (r"x=5", "x = 5"), ("−3", "-3"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"), ("(1/2, 3]", r"(0.5,3]"), ("3, 5, 7", "3,5,7"),
        (r"11\sqrt2", r"11 \sqrt{2}"), (r"\frac{3\sqrt{3}}{4}", r"\dfrac{3 \sqrt 3}{4}"), ("x^{2}+1", "x^2 + 1"), ("4210_{5}", "4210_5"),
        ("x = 1,000", "1000"), (r"18\$", "18"), (r"10\,000", "10000"), (r"864\text{ cm}^2", "864"), (r"864 \mbox{ inches}^2", "864"),
        (r"\frac{\pi}{2}", r"\pi/2"), (r"\frac{2\pi}{3}", r"2\pi/3"), (r"\frac{\sqrt3}{3}", r"\sqrt{3}/3"), (r"x \leq 5", r"x \le 5"),
        (r"\displaystyle\frac12", "1/2"), ("{18}", "18"), ("x_1 = 5", "5"), ("5 apples", "5"), ("18 minutes", "18"), (r"5\text{ cm}", r"5\text{ cm}"),
        (r"\frac12\text{ hour}", "1/2"), ("5 apples", "5 apple"), (r"\text{Evelyn}", "Evelyn"), (r"\text{(C)}", "C"), (r"\(7\)", "7"), ("$7$", "7"), ("0.3333333", "1/3"), (r"1.2\times10^{3}", "1200")]
DIFFERENT = [("50%", "0.5"), ("1 2", "12"), ("21/2", r"2\frac12"), ("(1,2)", "[1,2]"), ("(1,2)", "(2,1)"), ("1,2", "12"), ("3,5", "3,5,7"),
             (r"\frac{1}{2}x", r"\frac{1}{2x}"), (r"\frac{x}{y}z", r"\frac{x}{yz}"), (r"5\frac{1}{x}", "51/x"), (r"\frac{3}{4}5", r"\frac{3}{45}"),
             (r"\frac{1}{2}3", "1/23"), (r"\frac{1}{2}^2", "1/2^2"), (r"3\mathbf{i}", "3"), (r"2\mathrm{i}", "2"), (r"2+3\mathrm{i}", "2+3"),
             (r"4\mathrm{e}", "4"), (r"4\text{ p.m.}", r"4\text{ a.m.}"), (r"5\text{ million}", "5"), ("2 dozen", "2"), ("5 trillion", "5"), ("5 hundredths", "5"), ("3 halves", "3"), ("101 base two", "101"), (r"5\text{ cm}^2", r"5\text{ cm}^3"), (r"5\text{ cm}", r"5\text{ m}"),
             ("50 cents", "50 dollars"), (r"5\text{ east}", r"5\text{ west}"), (r"3\text{ feet }5\text{ inches}", r"3\text{ feet }5\text{ meters}"),
             ("x = 1,000", "1,0"), ("9" * 1990 + "/" + "9" * 1990 + "x", "5"), ("0.333", "1/3"), ("1/0", "0"), ("nan", "0"), ("", "0"), (" ", "0"), ("x", "5"), ("5x", "5"), ("-5", "5"), ("2^3", "23"),
             ("²", "2"), ("٣", "3"), ("1e999", "1e998"), ("1_000", "1000"), ("0x10", "16"), ("__import__('os')", "0"), ("9**9**9", "1"),
             (r"\frac{1}{2", "1/2"), ("5" * (MAX_ANSWER + 1), "5")]


@pytest.mark.parametrize("a, b", SAME)
def test_answers_that_are_the_same(a, b):
    assert same_answer(a, b) and same_answer(b, a), (normal_form(a), normal_form(b))


@pytest.mark.parametrize("a, b", DIFFERENT)
def test_answers_that_differ(a, b):
    assert not same_answer(a, b) and not same_answer(b, a), (normal_form(a), normal_form(b))


def test_tolerance_is_one_millionth_and_any_accepted_answer_will_do():
    assert same_answer("1.000001", "1") and not same_answer("1.0000011", "1")
    assert same_answer("4", ("3", "4")) and not same_answer("5", ("3", "4")) and not same_answer(None, ("3",))
    assert to_number("2&1/2") == Fraction(5, 2) and to_number("1/0") is None


def test_no_text_breaks_the_parsers_or_keeps_them_busy():
    """Random texts of the characters that mean something, and repetitions that make careless patterns run for hours."""
    rng, pieces = Random(0), [r"\boxed{", "{", "}", r"\frac", r"\sqrt", "1", "12,345", " ", "\n", "```", "```python\n", "a", "\\", "^", "-", "/",
                              r"\text{", "$", "%", ".", "é", "\0", "\ud800", "<verify>", "approve", "</verify>", "####", "&", "(", ","]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(60))) for _ in range(1500)]
    texts += [r"\boxed{" + "9" * 1900 + middle + "9" * 1900 + "x}" for middle in ("/", ".", ",", " ", "")]
    texts += [r"\boxed{1 " + "a" * 980 + "!}", r"\boxed{1\text{" + "a " * 450 + "}!}"]
    texts += [piece * (100_000 // len(piece)) for piece in pieces] + [r"\boxed{" + p * (3000 // len(p)) + "}" for p in pieces]
    slowest = 0.0
    for text in texts:
        start = time.process_time()
        for answer in (last_boxed(text), text):
            same_answer(answer, "1/2")
        python_block(text), final_answer(text)
        slowest = max(slowest, time.process_time() - start)
    assert slowest < 0.25


# -- problems ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_generated_problems_are_right_and_the_splits_do_not_meet(level):
    seen = {"train": set(), "eval": set()}
    for seed in range(200):
        for split in seen:
            problem = generate_problem(Random(seed), level, split)
            value = problem.steps[0][0]
            for before, op, b in problem.steps:
                assert before == value
                value = {"+": value + b, "-": value - b, "*": value * b}[op]
            assert problem.answers == (str(value),) and same_answer(last_boxed(worked(problem)), problem.answers)
            assert eval(expression(problem.steps)) == value                     # the text is ours, not a model's
            assert problem.question.startswith("What is") or all(str(b) in problem.question for _, _, b in problem.steps)
            seen[split].add(problem.steps)
    assert not seen["train"] & seen["eval"] and len(seen["eval"]) > 10


def test_the_teacher_forgets_to_carry():
    problem = Problem("What is 47 + 38?", ("85",), ((47, "+", 38),))
    assert worked(problem) == r"7+8=15, 4+3+1=8. \boxed{85}"
    said = {worked(problem, Random(seed)) for seed in range(20)}
    assert said == {worked(problem), r"7+8=15, 4+3=7. \boxed{75}"}
    assert worked(Problem("", ("125",), ((87, "+", 38),))) == r"7+8=15, 8+3+1=12. \boxed{125}"


def write(path, text):
    path.write_text(text if isinstance(text, str) else "\n".join(map(json.dumps, text)), encoding="utf-8")
    return path


@pytest.mark.parametrize("row, answers", [
    ({"question": "q", "answer": "7 clips.\n#### 72"}, ("72",)),                        # GSM8K
    ({"problem": "q", "solution": r"so \boxed{3} and thus $\boxed{\frac12}$."}, (r"\frac12",)),     # MATH
    ({"problem": "q", "answer": "27.0", "solution": "long\nstory", "url": "u"}, ("27.0",)),         # AMC
    ({"prompt": "q", "answer": r"\left( 3, \frac{\pi}{2} \right)"}, (r"\left( 3, \frac{\pi}{2} \right)",)),
    ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": 18}, ("18",)),
    ({"question": "q", "answer": "first this,\nthen that", "solution": r"\boxed{3}"}, ("3",)),
    ({"question": "q", "answers": ["4", "four"]}, ("4", "four")), ({"question": "q", "answer": 0}, ("0",))])
def test_rows_in_the_shapes_that_people_have(tmp_path, row, answers):
    problem, = load_problems(write(tmp_path / "data.jsonl", [row]))
    assert (problem.question, problem.answers) == ("q", answers)
    assert load_problems(write(tmp_path / "data.json", json.dumps([row, row], indent=1))) == [problem, problem]


def test_files_with_bom_crlf_blank_lines_and_unicode_separators(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "1 + 1", "answer": "2"}\r\n\r\n{"question": "a\xe2\x80\xa8b", "answer": 3}\r\n')
    assert [p.answers for p in load_problems(path)] == [("2",), ("3",)]


@pytest.mark.parametrize("text, says", [
    (None, "no such file"), ("", "the file is empty"), ("  \n", "the file is empty"), ("[]", "the file has no rows"),
    ("hello", "line 1: not JSON"), ('{"question": "q", "answer": 1}\n{"question": "q"', "line 2: not JSON"),
    ('{"question": "q", "answer": 1}\n\n{"query": "q", "answer": 1}', "line 3: no question; looked for question, problem, prompt, found query, answer"),
    ('{"question": "q", "reply": "4"}', "line 1: no answer"), ('{"question": "", "answer": 4}', "line 1: no question"),
    ('{"question": "q", "answer": null}', "line 1: no answer"), ('{"question": "q", "answer": true}', "line 1: no final answer in question, answer"),
    ('{"question": "q", "answer": {"a": 1}}', "line 1: no final answer in question, answer"), ('{"question": "q", "answer": ["1", null]}', "line 1: no final answer in question, answer"),
    ('{"question": "\\ud800 q", "answer": 1}', "line 1: the text is not valid unicode"), ('{"question": "q", "solution": "several\\nlines"}', "line 1: no final answer"), ("[1, 2]", "row 1: needed is an object"),
    ('[{"question": "q", "answer": 1}, {"question": "q"}]', "row 2: no answer"), ("[[" * 50_000, "not JSON"), ("3", "line 1: needed is an object")])
def test_a_file_that_cannot_be_used_is_named_with_line_and_reason(tmp_path, text, says):
    path = tmp_path / "data.json"
    if text is not None:
        write(path, text)
    with pytest.raises(ValueError) as error:
        load_problems(path)
    assert says in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "data.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "data.json", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            load_problems(path)


# -- the teams' programs ----------------------------------------------------------------------------------------------


def test_the_last_python_block_counts():
    assert python_block("```python\nprint(1)\n``` then ```\nprint(2)\n```") == "print(2)\n"
    assert python_block("```json\n{}\n```") is None and python_block("```python\nprint(1)") is None and python_block("print(1)") is None
    assert python_block("```Python \nprint(1)\n```") == "print(1)\n"
    assert python_block("x ``` y\n```python\nprint(2)\n```") == python_block("```python\nprint(1)\n```python\nprint(2)\n```") == "print(2)\n"
    assert python_block("```bash\nls\n```\ntext\n```\nprint(2)\n```") == "print(2)\n"


# -- the math teams ---------------------------------------------------------------------------------------------------


def fresh(task, seed=0, **settings):
    env = TASKS[task](**settings)
    env.reset(Random(seed))
    return env


def math(answer="85", **settings):
    env = Math(problems=[Problem("What is 47 + 38?", (answer,))], **settings)
    env.reset(Random(0))
    return env


BOXED, PRINTS = r"47 + 38 = 85, so \boxed{85}", "```python\nprint(47 + 38)\n```"


CHANCE = {"plan-path": 0.35, "sokoban": 0.45, "code": 0.2}       # a goal may be one step away; two programs may print the same


@pytest.mark.parametrize("task, single", TEAMS)
def test_the_expert_always_wins_and_the_random_player_hardly_ever(task, single):
    wins = {"expert": 0, "random": 0}
    for seed in range(10):
        rng = Random(f"player {seed}")
        wins["expert"] += play(fresh(task, seed, single_agent=single), lambda env, agent: env.solve(agent))[1].success()
        wins["random"] += play(fresh(task, seed, single_agent=single), lambda env, agent: env.random_action(agent, rng))[1].success()
    assert wins["expert"] == 10 and wins["random"] <= 10 * CHANCE.get(task, 0.1)


@pytest.mark.parametrize("task, single", TEAMS)
def test_the_same_seed_gives_the_same_task_in_another_process(task, single):
    script = f"from envs import *; e = TASKS[{task!r}](single_agent={single}); e.reset(Random('0/train/3/1')); print(e.observe(e.acting()[0]))"
    environment = dict(os.environ, PYTHONHASHSEED=str(random.randrange(1000)), PYTHONPATH=os.path.dirname(sys.modules["envs"].__file__))
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True).stdout
    env = fresh(task, "0/train/3/1", single_agent=single)
    assert other == env.observe(env.acting()[0]) + "\n"


@pytest.mark.parametrize("task", TASKS)
def test_a_deepcopy_is_a_branch(task):
    """The same action in two copies gives equal states; the original stays as it was, and shared data is not copied."""
    env = fresh(task, 3)
    while acting := env.acting():
        before = copy.deepcopy(env.__dict__)
        one, two = copy.deepcopy(env), copy.deepcopy(env)
        action = env.solve(acting[0])
        assert one.step(acting[0], action) == two.step(acting[0], action)
        assert one.__dict__ == two.__dict__ != before == env.__dict__
        for shared in ("problems", "corpus", "index"):
            assert getattr(one, shared, None) is getattr(env, shared, None)
        env = one


@pytest.mark.parametrize("task", TASKS)
def test_who_does_not_act_now_is_told_so(task):
    env = fresh(task)
    with pytest.raises(ValueError, match="cannot act now"):
        env.step("nobody", "")


def test_reasoner_and_tool_see_each_other_from_the_next_turn_on():
    env = math()
    assert env.acting() == ("reasoner", "tool")
    before = env.observe("tool")
    env.step("reasoner", r"I say \boxed{75}")
    assert env.acting() == ("tool",) and env.observe("tool") == before       # both saw the state at the start of the turn
    env.step("tool", PRINTS)
    assert env.turn == 1 and env.acting() == ("reasoner", "tool")            # 75 and 85 differ: another turn
    for agent in env.acting():
        assert "I say" in env.observe(agent) and "print(47 + 38)" in env.observe(agent) and "It printed: 85" in env.observe(agent)


@pytest.mark.parametrize("reasoner, tool, over, success", [
    (BOXED, PRINTS, True, True), (r"\boxed{85.0}", PRINTS, True, True),
    (r"\boxed{75}", "```python\nprint(75)\n```", True, False),          # they agree on what is wrong: the play is over
    (r"\boxed{85}", "```python\nprint(75)\n```", False, True), ("no box", "no program", False, False)])
def test_the_play_ends_when_both_agree(reasoner, tool, over, success):
    env = math()
    env.step("reasoner", reasoner), env.step("tool", tool)
    assert (env.acting() == ()) == over and env.success() == success


def test_the_play_ends_after_the_turns_and_the_last_answer_counts():
    env = math(turns=2)
    env.step("reasoner", BOXED), env.step("tool", "")
    env.step("reasoner", r"\boxed{75}"), env.step("tool", PRINTS)
    assert env.acting() == () and env.turn == 2 and not env.success()


@pytest.mark.parametrize("text, reward", [
    (BOXED, Reward(1, 1.0)), (r"\boxed{75}", Reward(0, 0.2)), ("85", Reward(0, 0, False)), (r"\boxed{}", Reward(0, 0, False))])
def test_what_a_reasoner_earns(text, reward):
    """.2 for the format, .8 for the right answer; the team earns 1 if it is right (AT-GRPO). The prompt's \\boxed is not the answer's."""
    assert math().step("reasoner", text) == reward


@pytest.mark.parametrize("text, local, valid", [
    (PRINTS, 1.0, True), ("```python\nprint(75)\n```", 0.2, True), ("```python\nprint(1/0)\n```", 0.1, True), ("```python\npass\n```", 0.1, True),
    ("```python\nprint(\n```", 0, False), ("print(85)", 0, False), ("85", 0, False),
    ("```python\nprint('so it is')\nprint(85)\n```", 1.0, True), ("```python\nraise SystemExit(print(85))\n```", 1.0, True)])
def test_what_a_tool_agent_earns(text, local, valid):
    """.1 builds, .1 runs and prints an answer, .8 right. Its team part is the reasoner's success in this turn."""
    env = math()
    env.step("reasoner", r"\boxed{75}")
    got = env.step("tool", text)
    assert (got.team, got.valid) == (0, valid) and abs(got.local - local) < 1e-9
    env = math()
    env.step("reasoner", BOXED)
    assert env.step("tool", text).team == 1


@pytest.mark.parametrize("task, agent", [("math", "reasoner"), ("math-verify", "solver")])
def test_a_single_agent_answers_once(task, agent):
    env = fresh(task, single_agent=True)
    assert env.agents == env.acting() == (agent,)
    env.step(agent, "nonsense")
    assert env.acting() == () and env.turn == 1 and not env.success()


def verify(**settings):
    env = MathVerify(problems=[Problem("What is 47 + 38?", ("85",))], **settings)
    env.reset(Random(0))
    return env


def test_solver_and_verifier_take_turns_and_the_last_round_has_no_verifier():
    env = verify()
    env.step("solver", r"I say \boxed{75}")
    assert env.acting() == ("verifier",) and "I say" in env.observe("verifier")
    env.step("verifier", "Wrong carry. <verify>reject</verify>")
    assert env.acting() == ("solver",) and env.turn == 1
    assert "I say" in env.observe("solver") and "Wrong carry." in env.observe("solver")
    env.step("solver", BOXED)
    assert env.acting() == () and env.turn == 2 and env.success()


@pytest.mark.parametrize("verdict, on_right, on_wrong, valid, over", [
    ("<verify>approve</verify>", 1, 0, True, True), ("<verify>reject</verify>", 0, 1, True, False),
    ("<VERIFY> Reject </VERIFY>", 0, 1, True, False), ("looks fine", 0, 0, False, True), ("<verify>maybe</verify>", 0, 0, False, True),
    ("<verify>approve</verify> no, <verify>reject</verify>", 0, 1, True, False)])
def test_what_a_verifier_earns_and_does(verdict, on_right, on_wrong, valid, over):
    """Local 1 if the verdict is true. A text without a verdict approves, earns nothing and counts as invalid."""
    for solution, local in ((BOXED, on_right), (r"\boxed{75}", on_wrong)):
        env = verify()
        assert env.step("solver", solution) == Reward(team=float(solution == BOXED))
        assert env.step("verifier", verdict) == Reward(local=local, valid=valid)
        assert (env.acting() == ()) == over


@pytest.mark.parametrize("task, single", TEAMS)
def test_any_text_gets_a_reward_and_never_an_exception(task, single):
    rng = Random(1)
    hostile = ["", "\0", "\ud800", "é" * 1000, r"\boxed{9**9**9}", r"\boxed{" * 5000, "```python\n" * 300, "<verify>" * 5000, "1" * 100_000,
               "```python\nprint(open('/etc/passwd').read())\n```", "```python\nraise Exception('\\\\boxed{85}')\n```", "<verify>approve</verify>"]
    for seed in range(4):
        def choose(env, agent):
            assert isinstance(env.observe(agent), str)
            return rng.choice(hostile)
        rewards, env = play(fresh(task, seed, single_agent=single), choose)
        assert all(0 <= r.team <= 1 and 0 <= r.local <= 1 for _, r in rewards) and not env.success()


def test_terse_prompts_say_the_same_in_fewer_words():
    env = math(terse=True)
    assert env.observe("tool") == "tool: What is 47 + 38?"
    env.step("reasoner", r"\boxed{75}"), env.step("tool", PRINTS)
    assert env.observe("reasoner") == "reasoner: What is 47 + 38? Before: 75, tool 85."


def test_what_is_held_out_is_the_same_everywhere():
    assert [i for i in range(20) if held_out(str(i))] == [0, 4, 9, 15]
    assert 150 < sum(held_out(str(i)) for i in range(1000)) < 250
