"""The tasks: problems, prompts, parsers, rewards and the sandbox in which a model's program runs. No torch in here.

An env is one task instance with its state. Its whole interface is `acting` (who has to act now), `observe` (that
agent's prompt) and `step` (its text, and what it earns); the rest serves the baselines and the tiny model's teacher.
State is plain Python, so `copy.deepcopy(env)` is a branch of the tree.

    from random import Random
    env = TASKS["math"](level=2)
    env.reset(Random(0))
    rewards, env = play(env, lambda env, agent: env.solve(agent))     # the expert plays; no model needed

Read it part by part: 1. the interface, 2. problems, 3. grading, 4. the sandbox, 5. the math teams, 6. the table of tasks.
Left out: tool calls in the middle of a completion, images, and any `eval` of a text that a model wrote.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Callable, NamedTuple


# ---------------------------------------------------------------------------------------------------------------------
# 1. The interface
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Reward:
    """What one action earned: AT-GRPO Eq. 3 mixes team and local, Dr. MAS looks at `valid` only."""

    team: float = 0.0       # what the state after this action earns the team, in [0, 1]
    local: float = 0.0      # this agent's own part, in [0, 1]
    valid: bool = True      # False: the text could not be parsed


class Env:
    """One task instance. `agents` in the order in which they act; `turn` counts passes over them, from 0."""

    agents: tuple[str, ...]
    turn: int

    def reset(self, rng: Random) -> None:
        """Draw a task; the same seed gives the same task, in any process."""
        raise NotImplementedError

    def acting(self) -> tuple[str, ...]:
        """Who still has to act in this round. Several names act at once; () means that the play is over."""
        raise NotImplementedError

    def observe(self, agent: str) -> str:
        """The user message for this agent. Agents that act at once all see the state at the start of the turn."""
        raise NotImplementedError

    def step(self, agent: str, action: str) -> Reward:
        """Apply one action. Never raises on any text; an agent that is not in `acting()` is a ValueError."""
        raise NotImplementedError

    def success(self) -> bool:
        """Is the task solved in the present state?"""
        raise NotImplementedError

    def solve(self, agent: str) -> str:
        """The expert: a right action for the present state."""
        raise NotImplementedError

    def slip(self, agent: str, rng: Random) -> str:
        """The imperfect teacher of the tiny model: `solve` with one systematic mistake, made most of the time."""
        raise NotImplementedError

    def random_action(self, agent: str, rng: Random) -> str:
        """A well-formed action that knows nothing: the baseline that any learning has to beat."""
        raise NotImplementedError


def play(env: Env, choose: Callable[[Env, str], str]) -> tuple[list[tuple[str, Reward]], Env]:
    """Play a reset env to its end with any chooser, a function (env, agent) -> text; returns who earned what, and env."""
    rewards = []
    while acting := env.acting():
        texts = [choose(env, agent) for agent in acting]    # all see the state at the start of the round
        rewards += [(agent, env.step(agent, text)) for agent, text in zip(acting, texts)]
    return rewards, env


class Shared(list):
    """Read-only data of many envs: a deepcopy of an env keeps it instead of copying it."""

    def __deepcopy__(self, memo: dict) -> "Shared":
        return self


# ---------------------------------------------------------------------------------------------------------------------
# 2. Problems: generated, or from a file
# ---------------------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    question: str
    answers: tuple[str, ...]                            # any of these is right
    steps: tuple[tuple[int, str, int], ...] = ()        # generated problems only: 47 + 38, 85 - 12, ...


LEVELS = {1: (1, 1, "+"), 2: (2, 1, "+"), 3: (2, 2, "+-"), 4: (2, 3, "+-*"), 5: (3, 4, "+-*")}    # digits, steps, ops
STORY = {"+": "{who} finds {b} more.", "-": "{who} gives away {b}.", "*": "{who} swaps them for {b} times as many."}


def generate_problem(rng: Random, level: int, split: str) -> Problem:
    """Draw a sum ("What is 47 + 38?") or a word problem, one half each. split is "train" or "eval": disjoint sums."""
    digits, count, operations = LEVELS[level]
    while True:
        start = value = rng.randrange(10 ** (digits - 1), 10**digits)
        steps = []
        for _ in range(count):
            op = rng.choice(operations)
            b = rng.randint(2, 9) if op == "*" else rng.randrange(10 ** (digits - 1), 10**digits)
            op = "+" if op == "-" and b > value else op     # nobody gives away what they do not have
            steps.append((value, op, b))
            value = {"+": value + b, "-": value - b, "*": value * b}[op]
        if held_out(repr(steps)) == (split == "eval"):
            break

    if rng.random() < 0.5:
        question = f"What is {expression(steps)}?"
    else:
        who, what = rng.choice(("Ann", "Ben", "Cleo", "Dan")), rng.choice(("apples", "coins", "cards"))
        story = " ".join(STORY[op].format(who=who, b=b) for _, op, b in steps)
        question = f"{who} has {start} {what}. {story} How many {what} does {who} have now?"
    return Problem(question, (str(value),), tuple(steps))


def expression(steps: list | tuple) -> str:
    """((47, "+", 38), (85, "*", 3)) -> "(47 + 38) * 3"."""
    text = str(steps[0][0])
    for i, (_, op, b) in enumerate(steps):
        text = f"({text}) * {b}" if op == "*" and i else f"{text} {op} {b}"
    return text


def held_out(problem: str) -> bool:
    """Is this one of the problems, one in five, kept for evaluation? Decided by a hash: no run and no process mixes them."""
    return hashlib.sha256(problem.encode("utf-8", "replace")).digest()[0] % 5 == 0


QUESTION_FIELDS = ("question", "problem", "prompt")
ANSWER_FIELDS = ("answer", "answers", "final_answer", "solution")


def load_problems(path: str | Path) -> list[Problem]:
    """Read problems from .jsonl (one object a line) or .json (one array of objects), in the shapes that people have.

    The question stands under "question", "problem" or "prompt"; the answer under "answer", "answers", "final_answer" or
    "solution", as a number, a text, or a list of accepted ones. Of a worked solution the part after `####` counts, else
    its last \\boxed{}. Raises ValueError: one line that names the file, the line and what was missing.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error.__class__.__name__})") from None
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; needed is one JSON object a line, with a question and an answer")

    if text.lstrip().startswith("["):       # one array
        rows = [(f"row {i}", row) for i, row in enumerate(_json(text, f"{path}"), 1)]
    else:
        lines = [(f"line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(where, _json(line, f"{path}, {where}")) for where, line in lines]
    if not rows:
        raise ValueError(f"{path}: the file has no rows")
    return [_problem(row, f"{path}, {where}") for where, row in rows]


def _json(text: str, where: str):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def _problem(row, where: str) -> Problem:
    """One row of a file as a Problem. Raises ValueError with what is missing."""
    if not isinstance(row, dict):
        raise ValueError(f'{where}: needed is an object {{"question": ..., "answer": ...}}, not {type(row).__name__}')
    question = next((row[f] for f in QUESTION_FIELDS if row.get(f)), None)
    if isinstance(question, list) and question and isinstance(question[-1], dict):      # a chat: its last message
        question = question[-1].get("content")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: no question; looked for {', '.join(QUESTION_FIELDS)}, found {_fields(row)}")

    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the text is not valid unicode (half of a surrogate pair)") from None

    given = [row[f] for f in ANSWER_FIELDS if row.get(f) not in (None, "", [])]
    if not given:
        raise ValueError(f"{where}: no answer; looked for {', '.join(ANSWER_FIELDS)}, found {_fields(row)}")
    for answer in given:                # the first that can be used
        accepted = answer if isinstance(answer, list) else [answer]
        if all(isinstance(a, (str, int, float)) and not isinstance(a, bool) for a in accepted):
            finals = tuple(final_answer(str(a)) for a in accepted)
            if all(finals):
                return Problem(question.strip(), finals)
    raise ValueError(f"{where}: no final answer in {_fields(row)}; needed is `#### answer`, \\boxed{{answer}}, the answer "
                     "alone, or a list of accepted ones")


def _fields(row: dict) -> str:
    return ", ".join(repr(name)[1:-1] for name in row)[:200] or "nothing"


def final_answer(solution: str) -> str | None:
    """The answer in a data set's solution: what follows the last `####`, else the last box, else a text of one line."""
    solution = solution.strip()
    if "####" in solution:
        solution = solution.rsplit("####", 1)[1].strip()
    elif r"\boxed" in solution:
        return last_boxed(solution)
    return solution if solution and "\n" not in solution and len(solution) <= MAX_ANSWER else None


# ---------------------------------------------------------------------------------------------------------------------
# 3. Grading. Every function here takes any text, never raises, and is done in milliseconds.
# ---------------------------------------------------------------------------------------------------------------------

MAX_ANSWER = 4000       # characters; a longer answer is invalid before anything looks into it


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces balance; None without one, or if it is empty or too long."""
    if r"\boxed" not in text:
        return None
    stack, found = [], None         # stack: where each open brace's content starts, and whether \boxed stands before it
    for match in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):       # \{ and \} are text, not braces
        token = match.group()
        if token == "}" and stack:
            start, boxed = stack.pop()
            if boxed and (found is None or start > found[0]):
                found = start, match.start()
        elif token.endswith("{") and token != r"\{":
            stack.append((match.end(), len(token) > 1))
    content = text[slice(*found)].strip() if found else ""
    return content if 0 < len(content) <= MAX_ANSWER else None


def normal_form(answer: str) -> str:
    r"""Rewrite an answer so that different ways of writing it become the same text.

        1/2, \frac12, \dfrac{1}{2}, \left. \tfrac 1 2 \right.      ->  1/2          2\frac{1}{2}, 2 1/2     ->  2&1/2
        \$32,\!348     32,348 dollars                               ->  32348        50\%                    ->  50
        120^\circ      120\text{ degrees}    5\text{ cm}            ->  120, 5       x = 5                   ->  5
        \text{Evelyn}  ->  Evelyn      \text{(C)}  ->  C            \sqrt2, \sqrt{2} ->  sqrt(2)

    Spaces go, except between two digits. A percent is compared as written: 50% is 50, not 0.5.
    """
    s = re.sub(r"\s+", " ", answer).strip().replace("\u2212", "-")
    s = re.sub(r"\\!\s*", "", s).replace("{,}", ",").replace(r"\displaystyle", "")
    s = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3})", "", s)
    s = re.sub(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " ", s)
    s = re.sub(r"(?<!\\)\\[()\[\]]", "", s)
    s = re.sub(r"\\(left|right)(?![a-zA-Z])\.?", "", s)
    s = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", s)
    s = re.sub(r"\^\s*(\\circ|\{\s*\\circ\s*\})|\u00b0|\\degree(?![a-zA-Z])", "", s)
    s = re.sub(r"\\?[$%]|[\u20ac\u00a3]", "", s)

    s = re.sub(r"\\(le|ge|ne)q(?![a-zA-Z])", r"\\\1", s)
    s = re.sub(r"^\s*[a-zA-Z](_[0-9a-zA-Z])?\s*=", "", s)
    s, _ = split_unit(s)
    s = re.sub(r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}", r"\1", s)
    s = re.sub(r"^\{([^{}]*)\}$", r"\1", s.strip().rstrip(".")).strip()
    if re.fullmatch(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?", s):
        s = s.replace(",", "")

    argument = r"\s*(\{[^{}]*\}|[0-9a-zA-Z])"                              # {12}, or a single 1 as in \frac12
    while True:                                                            # inside out; each round removes a command
        new = re.sub(rf"\\sqrt{argument}", lambda m: f"sqrt({m[1].strip('{} ')})", s)
        new = re.sub(rf"([0-9]?)\s*\\frac{argument}{argument}", _fraction, new)
        new = re.sub(r"([\^_])\s*\{\s*([0-9a-zA-Z])\s*\}", r"\1\2", new)
        if new == s:
            break
        s = new
    s = re.sub(r"^([+-]?[0-9]+)\s+([0-9]+/[0-9]+)$", r"\1&\2", s)
    s = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", s)
    return re.sub(r"^\(([a-zA-Z])\)$", r"\1", s)


def split_unit(answer: str) -> tuple[str, str]:
    r"""("5\text{ cm}^2") -> ("5", "cm"); a unit is a word, plain or in \text{}, after a number or a fraction of numbers."""
    number = r"\s*[+-]?(?:[0-9][0-9.,/ ]*|[0-9]* ?\\frac *(?:\{[0-9]+\}|[0-9]) *(?:\{[0-9]+\}|[0-9]))"
    word = r"\\(?:text|mbox|textrm|mathrm)\s*\{\s*([a-zA-Z]{2,}|[mgshL])[a-zA-Z ]*\}|(?<=[\s}])([a-zA-Z]{3,})[a-zA-Z ]*"
    match = re.fullmatch(rf"({number})(?<! )\s*(?:{word})(?:\^\{{?[23]\}}?)?\s*\.?", re.sub(r"\s+", " ", answer))
    unit = (match[2] or match[3]).lower().rstrip("s") if match else ""
    if unit in ("", "million", "billion", "thousand", "hundred", "dozen", "squared", "cubed", "factorial", "or", "and"):
        return answer, ""                                       # no unit, but a part of the number
    return match[1], unit


def _fraction(match: re.Match) -> str:
    r"""A \frac with its two arguments as a/b; a digit before a numeric one makes a mixed number, written 2&1/2."""
    before, a, b = match[1], *(re.sub(r"\s+", "", x).strip("{}") for x in match.groups()[1:])
    atom = r"-?[0-9.]+|[a-zA-Z]|\\[a-zA-Z]+|sqrt\([^()]*\)"
    top = a if re.fullmatch(rf"-?[0-9.]*(?:{atom})?", a) else f"({a})"          # 2x/3 is (2x)/3, but 2/3x is not 2/(3x)
    fraction = f"{top}/{b if re.fullmatch(atom, b) else f'({b})'}"
    if before and (a + b).isdigit():
        return f"{before}&{fraction}"
    multiplied = before or re.match(r"\s*[0-9a-zA-Z\\^(]", match.string[match.end():])
    return f"{before}({fraction})" if multiplied else fraction


def to_number(answer: str) -> Fraction | None:
    """An answer in normal form as an exact number: 27.0, -3/4, 2&1/2, 1e-05, 1.2\\times10^3; None for anything else."""
    decimal = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
    if m := re.fullmatch(rf"({decimal})(?:/({decimal}))?", answer):
        bottom = Fraction(m[2] or 1)
        return Fraction(m[1]) / bottom if bottom else None
    if m := re.fullmatch(r"([+-]?)([0-9]+)&([0-9]+)/([0-9]+)", answer):
        value = int(m[2]) + Fraction(int(m[3]), int(m[4])) if int(m[4]) else None
        return -value if value is not None and m[1] == "-" else value
    if m := re.fullmatch(rf"({decimal})\\(?:times|cdot)10\^\{{?([+-]?[0-9]{{1,3}})\}}?", answer):
        return Fraction(m[1]) * Fraction(10) ** int(m[2])
    return None


def same_answer(given: str | None, accepted: str | tuple[str, ...]) -> bool:
    """Does the given answer equal one of the accepted ones? As numbers |a - b| <= 1e-6, else in normal form.

    Comma-separated lists, tuples and intervals are compared part by part, in order. None, an empty answer and one of
    more than 4,000 characters equal nothing.
    """
    if isinstance(accepted, (tuple, list)):
        return any(same_answer(given, a) for a in accepted)
    if given is None or not 0 < len(given.strip()) <= MAX_ANSWER or not 0 < len(accepted.strip()) <= MAX_ANSWER:
        return False
    a, b = normal_form(given), normal_form(accepted)
    units = {split_unit(given)[1], split_unit(accepted)[1]} - {""}
    if not a or not b or len(units) > 1:                        # 5 cm is 5, but not 5 m
        return False
    if a == b or same_number(a, b):
        return True
    parts, others = _parts(a), _parts(b)
    return len(parts) == len(others) > 1 and all(p == o or same_number(p, o) for p, o in zip(parts, others))


def same_number(a: str, b: str) -> bool:
    """Are both numbers, in normal form, and at most 1e-6 apart?"""
    x, y = to_number(a), to_number(b)
    return x is not None and y is not None and abs(x - y) <= Fraction(1, 10**6)


def _parts(answer: str) -> list[str]:
    """"(1/2,3]" -> ["(", "1/2", "3", "]"]; the brackets count, as an open interval is not a closed one."""
    opening, closing = answer[:1], answer[-1:]
    if opening not in "([" or closing not in ")]" or len(answer) < 2:
        return answer.split(",")
    return [opening, *answer[1:-1].split(","), closing]


# ---------------------------------------------------------------------------------------------------------------------
# 4. The sandbox
# ---------------------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    built: bool         # the text compiles as Python
    ok: bool            # it ran to its end, with exit status 0
    stdout: str
    error: str          # one line: what went wrong


CPU_SECONDS, WALL_SECONDS, MEMORY, OUTPUT, MAX_PROGRAM = 2, 10, 512 << 20, 64 << 10, 20_000
NOT_BUILT = 97          # the runner's exit status for a text that does not compile

# The child limits itself before it looks at the program: code that runs between fork and exec is unsafe beside threads.
RUNNER = f"""
import resource, sys
for what, most in ((resource.RLIMIT_CPU, {CPU_SECONDS}), (resource.RLIMIT_AS, {MEMORY}),
                   (resource.RLIMIT_FSIZE, {OUTPUT}), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 32)):
    try: resource.setrlimit(what, (most, most))
    except (ValueError, OSError): pass
source, sys.argv = sys.argv[1], ["program.py"]
try: code = compile(source, "program.py", "exec")
except BaseException as e: sys.stderr.write(type(e).__name__ + ": " + str(e)); sys.exit({NOT_BUILT})
import builtins
builtins.exit = builtins.quit = sys.exit        # -S has left them out
del resource, what, most, source, sys, builtins
exec(code)
"""


def run_program(program: str, stdin: str = "") -> Outcome:
    """Run a Python program (standard library only) in a process of its own and return what it printed.

    At most 2 s of CPU time, 10 s of wall time, 512 MiB of memory and 64 KiB in each file it writes, stdout included. It
    starts in an empty folder that is deleted afterwards, with an empty environment, in its own process group, which is
    killed at the end. This stops accidents; it is no security boundary. Needs a POSIX system.
    """
    if len(program) > MAX_PROGRAM:
        return Outcome(False, False, "", f"the program has more than {MAX_PROGRAM} characters")
    try:
        program.encode()
    except UnicodeEncodeError:
        return Outcome(False, False, "", "the program is not valid unicode")
    if "\0" in program:
        return Outcome(False, False, "", "the program contains a NUL character")

    folder = tempfile.mkdtemp()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode("utf-8", "replace"))
        given.seek(0)
        # -I: no variables and no user folder; -S: no site-packages, so that it starts in 15 ms
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", RUNNER, program], stdin=given, stdout=out, stderr=err,
                                 cwd=folder, env={}, start_new_session=True)
        try:
            status = child.wait(WALL_SECONDS)
        except subprocess.TimeoutExpired:
            status = -signal.SIGALRM
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)        # its children too
            except ProcessLookupError:
                pass
            child.wait()
            try:
                shutil.rmtree(folder, ignore_errors=True)
            except RecursionError:                              # a thousand folders, one in the other
                subprocess.run(["rm", "-rf", folder], check=False)
        out.seek(0)
        err.seek(0, os.SEEK_END)
        err.seek(max(0, err.tell() - 1000))
        stdout = out.read(OUTPUT).decode("utf-8", "replace")
        lines = err.read().decode("utf-8", "replace").strip().split("\n")

    killed = {signal.SIGXCPU: "out of CPU time", signal.SIGKILL: "out of CPU time", signal.SIGALRM: "out of time"}
    error = killed.get(-status, f"killed by signal {-status}") if status < 0 else lines[-1][:200] if status else ""
    return Outcome(status != NOT_BUILT, status == 0, stdout, error)


def python_block(text: str) -> str | None:
    """The last closed ```python block (the language may be missing); None without one."""
    blocks = text.split("```")[1:-1:2]
    for block in reversed(blocks):
        language, newline, program = block.partition("\n")
        if newline and language.strip().lower() in ("", "python", "py", "python3"):
            return program
    return None


# ---------------------------------------------------------------------------------------------------------------------
# 5. The math teams
# ---------------------------------------------------------------------------------------------------------------------


SLIP = 0.7      # how often the tiny model's teacher makes its mistake: mostly, so that greedy decoding makes it always


def worked(problem: Problem, rng: Random | None = None) -> str:
    """A generated problem worked out column by column, with the answer in a box. rng: by the teacher, who forgets to carry.

        47 + 38 is "7+8=15, 4+3+1=8. \\boxed{85}", and for the teacher, seven times in ten, "7+8=15, 4+3=7. \\boxed{75}"
    """
    if not problem.steps:
        return rf"\boxed{{{problem.answers[0]}}}"
    said, value = [], problem.steps[0][0]
    for _, op, b in problem.steps:
        if op != "+":
            result = value - b if op == "-" else value * b
            said.append(f"{value}{op}{b}={result}")
        else:
            columns, result = _add(value, b, forget=rng is not None and rng.random() < SLIP)
            said.append(columns)
        value = result
    return ", ".join(said) + rf". \boxed{{{value}}}"


def _add(a: int, b: int, forget: bool) -> tuple[str, int]:
    """Add column by column, from the right: what is said, and the sum. forget: nothing is carried to the next column."""
    said, result, carry, place = [], 0, 0, 1
    while a or b:
        total = a % 10 + b % 10 + carry
        said.append(f"{a % 10}+{b % 10}" + (f"+{carry}" if carry else "") + f"={total}")
        a, b, last = a // 10, b // 10, not (a // 10 or b // 10)
        result += (total if last else total % 10) * place
        carry, place = 0 if forget else total // 10, place * 10
    return ", ".join(said), result


BOX = "Think, then end with the final answer in \\boxed{}, for example: 3 + 4 = 7, so the answer is \\boxed{7}."
PROGRAM = ("Write a Python program that computes the answer and prints it, and nothing else. Use the standard library only. "
           "Put it in one ```python block.")


def draw(env: Env, rng: Random) -> Problem:
    """One problem for a math env: from its own list if it has one, else generated."""
    return rng.choice(env.problems) if env.problems else generate_problem(rng, env.level, env.split)


def check_turn(env: Env, agent: str) -> None:
    if agent not in env.acting():
        raise ValueError(f"{agent!r} cannot act now; acting: {env.acting() or 'nobody, the play is over'}")


def shorten(text: str, limit: int = 300) -> str:
    """A long text as its first and last half limit of characters."""
    return text if len(text) <= limit else f"{text[:limit // 2]} ... {text[-limit // 2:]}"


class MathTurn(NamedTuple):
    """What the math team did in one turn; None where an agent's text held no answer."""

    solution: str = ""
    boxed: str | None = None
    program: str = ""
    printed: str | None = None
    error: str = ""


class Math(Env):
    """AT-GRPO's math team (paper section on math, appendix on rewards): a reasoner and a tool agent, at once.

    The reasoner thinks and answers in a box; the tool agent writes a program that prints the answer, which is run. Each
    sees the other's work from the next turn on. The play ends when their answers agree, or after `turns`. Team reward:
    1 if the reasoner's answer is right. Local: reasoner .2 format + .8 right; tool .1 builds + .1 runs and prints an
    answer + .8 right. The teacher's slips: the reasoner forgets to carry, the tool agent takes more for less in stories.
    """

    agents = ("reasoner", "tool")

    def __init__(self, problems: list[Problem] | None = None, level: int = 2, turns: int = 4,
                 single_agent: bool = False, terse: bool = False, split: str = "train"):
        self.problems, self.level, self.split, self.terse = Shared(problems or []), level, split, terse
        self.agents, self.turns = (("reasoner",), 1) if single_agent else (Math.agents, turns)

    def reset(self, rng: Random) -> None:
        self.problem, self.turn, self.boxed = draw(self, rng), 0, None      # boxed: the reasoner's latest answer
        self.history, self.now = [], MathTurn()                             # finished turns; this turn so far
        self.queue = list(self.agents)                                      # who is still to act in this turn

    def acting(self) -> tuple[str, ...]:
        return tuple(self.queue)

    def observe(self, agent: str) -> str:
        question = self.problem.question
        if self.terse:
            seen = "".join(f" Before: {t.boxed or 'none'}, tool {t.printed or 'none'}." for t in self.history[-1:])
            return f"{agent}: {question}{seen}"

        task = BOX if agent == "reasoner" else PROGRAM
        if not self.history:
            return f"{question}\n\n{task}"
        seen = "\n\n".join(
            f"Turn {i}. The reasoner's solution: {shorten(t.solution)}\nThe reasoner's answer: {t.boxed or 'none'}\n"
            f"The tool agent's program:\n{shorten(t.program) or 'none'}\n"
            f"It printed: {shorten(t.printed or '') or t.error or 'nothing'}" for i, t in enumerate(self.history, 1))
        return (f"{question}\n\nA reasoner and a tool agent have worked on this, and their answers differ.\n\n{seen}\n\n"
                f"Decide who is right, or find what both overlooked, and solve the problem again. {task}")

    def step(self, agent: str, action: str) -> Reward:
        check_turn(self, agent)
        self.queue.remove(agent)
        if agent == "reasoner":
            self.boxed = last_boxed(action)
            self.now = self.now._replace(solution=action, boxed=self.boxed)
            reward = Reward(local=0.2 * (self.boxed is not None) + 0.8 * self.success(), valid=self.boxed is not None)
        else:
            program = python_block(action)
            ran = run_program(program) if program is not None else Outcome(False, False, "", "no python block")
            last_line = ran.stdout.strip().rsplit("\n", 1)[-1].strip()
            printed = last_line if ran.ok and 0 < len(last_line) <= MAX_ANSWER else None
            self.now = self.now._replace(program=program or "", printed=printed, error=ran.error)
            right = same_answer(printed, self.problem.answers)
            reward = Reward(local=0.1 * ran.built + 0.1 * (printed is not None) + 0.8 * right, valid=ran.built)
        reward.team = float(self.success())
        if not self.queue:
            self._end_turn()
        return reward

    def _end_turn(self) -> None:
        agree = self.now.printed is not None and same_answer(self.now.boxed, self.now.printed)
        self.history.append(self.now)
        self.now = MathTurn()
        self.turn += 1
        if not agree and self.turn < self.turns:
            self.queue = list(self.agents)

    def success(self) -> bool:
        return same_answer(self.boxed, self.problem.answers)

    def solve(self, agent: str) -> str:
        if agent == "reasoner":
            return worked(self.problem)
        shown = expression(self.problem.steps) if self.problem.steps else repr(self.problem.answers[0])
        return f"```python\nprint({shown})\n```"

    def slip(self, agent: str, rng: Random) -> str:
        if agent == "reasoner":
            return worked(self.problem, rng)
        story = not self.problem.question.startswith("What")
        return self.solve(agent).replace("+", "-") if story and rng.random() < SLIP else self.solve(agent)

    def random_action(self, agent: str, rng: Random) -> str:
        guess = rng.randrange(10 ** len(self.problem.answers[0]))
        return rf"\boxed{{{guess}}}" if agent == "reasoner" else f"```python\nprint({guess})\n```"


class MathVerify(Env):
    """Dr. MAS's math loop (paper section 5.1, appendix B.1): a solver answers, a verifier approves or rejects.

    At most `turns` rounds, no verifier in the last one; approval ends the play. A text without a verdict approves, and
    counts as invalid. Rewards of a step are ours, so that AT-GRPO can train the team too: solver team 1[right], verifier
    local 1[its verdict is true]. The teacher's slips: the solver forgets to carry, the verifier approves what is wrong.
    """

    agents = ("solver", "verifier")

    def __init__(self, problems: list[Problem] | None = None, level: int = 2, turns: int = 2,
                 single_agent: bool = False, terse: bool = False, split: str = "train"):
        self.problems, self.level, self.split, self.terse = Shared(problems or []), level, split, terse
        self.agents, self.turns = (("solver",), 1) if single_agent else (MathVerify.agents, turns)

    def reset(self, rng: Random) -> None:
        self.problem, self.turn, self.solution, self.boxed = draw(self, rng), 0, "", None
        self.history, self.queue = [], ["solver"]       # history: one (solution, verdict text) per rejected round

    def acting(self) -> tuple[str, ...]:
        return tuple(self.queue)

    def observe(self, agent: str) -> str:
        question = self.problem.question
        if self.terse:
            seen = f" Said: {self.solution}" if agent == "verifier" else " Rejected." if self.history else ""
            return f"{agent}: {question}{seen}"

        seen = "".join(f"\n\nSolution {i}: {solution}\n\nThe verifier on solution {i}: {verdict}"
                       for i, (solution, verdict) in enumerate(self.history, 1))
        if agent == "solver":
            again = "The verifier rejected this. Mend the mistake and solve the problem again. " if seen else ""
            return f"{question}{seen}\n\n{again}{BOX}"
        return (f"{question}{seen}\n\nSolution {len(self.history) + 1}: {self.solution}\n\nCheck this solution step by "
                "step. Then end with your verdict, either <verify>approve</verify> or <verify>reject</verify>.")

    def step(self, agent: str, action: str) -> Reward:
        check_turn(self, agent)
        if agent == "solver":
            self.solution, self.boxed = action, last_boxed(action)
            last = self.turn == self.turns - 1
            self.queue = [] if last else ["verifier"]
            self.turn += last
            return Reward(team=float(self.success()), valid=self.boxed is not None)

        verdicts = re.findall(r"<verify>\s{0,9}(approve|reject)\s{0,9}</verify>", action, re.IGNORECASE)
        rejected = bool(verdicts) and verdicts[-1].lower() == "reject"
        true = bool(verdicts) and rejected != self.success()
        self.turn += 1
        if rejected:
            self.history.append((self.solution, action))
        self.queue = ["solver"] if rejected else []
        return Reward(local=float(true), valid=bool(verdicts))

    def success(self) -> bool:
        return same_answer(self.boxed, self.problem.answers)

    def solve(self, agent: str) -> str:
        if agent == "solver":
            return worked(self.problem)
        return f"<verify>{'approve' if self.success() else 'reject'}</verify>"

    def slip(self, agent: str, rng: Random) -> str:
        if agent == "solver":
            return worked(self.problem, rng)
        return "<verify>approve</verify>" if rng.random() < SLIP else self.solve(agent)

    def random_action(self, agent: str, rng: Random) -> str:
        if agent == "solver":
            return rf"\boxed{{{rng.randrange(10 ** len(self.problem.answers[0]))}}}"
        return f"<verify>{rng.choice(('approve', 'reject'))}</verify>"


# ---------------------------------------------------------------------------------------------------------------------
# 6. The table of tasks
# ---------------------------------------------------------------------------------------------------------------------

TASKS: dict[str, Callable[..., Env]] = {"math": Math, "math-verify": MathVerify}
