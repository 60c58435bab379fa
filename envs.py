"""The tasks: problems, prompts, parsers, rewards and the sandbox in which a model's program runs. No torch in here.

An env is one task instance with its state. Its whole interface is `acting` (who has to act now), `observe` (that
agent's prompt) and `step` (its text, and what it earns); the rest serves the baselines and the tiny model's teacher.
State is plain Python, so `copy.deepcopy(env)` is a branch of the tree.

    from random import Random
    env = TASKS["math"](level=2)
    env.reset(Random(0))
    rewards, env = play(env, lambda env, agent: env.solve(agent))     # the expert plays; no model needed

Read it part by part: 1. the interface, 2. problems, 3. reading and grading, 4. the sandbox; then task by task: 5. math,
6. games, 7. code, 8. search; 9. the table of tasks.
Left out: tool calls in the middle of a completion, images, and any `eval` of a text that a model wrote.
"""

import ast
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")       # of ast, about texts of models


# -- 1. The interface -------------------------------------------------------------------------------------------------


@dataclass
class Reward:
    """What one action earned: AT-GRPO Eq. 3 mixes team and local, Dr. MAS looks at `valid` only."""

    team: float = 0.0       # what the state after this action earns the team, in [0, 1]
    local: float = 0.0      # this agent's own part, in [0, 1]
    valid: bool = True      # False: the text could not be parsed


class Env:
    """One task instance. `agents` in the order in which they act; `turn` counts passes over them, from 0."""

    agents: tuple[str, ...]
    alone: str                  # who plays with --single-agent
    turn: int
    penalty = 0.1               # what a text that cannot be parsed costs in outcome credit, unless the user says otherwise
    most_turns, tiny_turns = 4, 2       # of a play, unless the user says otherwise; with the tiny model
    tiny: dict = {}             # flags that train.py sets for the tiny model, unless the user does: size, turns, ...
    recipe: dict = {}           # how the tiny model of this task is made, where it differs from the usual

    def __init__(self, turns: int | None = None, single_agent: bool = False, terse: bool = False, split: str = "train"):
        self.turns = turns or (self.tiny_turns if terse else self.most_turns)
        self.single_agent, self.terse, self.split = single_agent, terse, split
        self.agents = (self.alone,) if single_agent else self.agents
        self.queue: list[str] = []          # who still has to act in this round

    def load(self, path: str | Path) -> list:
        """Problems from a file. Raises ValueError with one line that says what is wrong with it."""
        raise ValueError(f"{path}: this task makes its own problems and reads none from files")

    def acting(self) -> tuple[str, ...]:
        """Who still has to act in this round. Several names act at once; () means that the play is over."""
        return tuple(self.queue)

    def take_turn(self, agent: str) -> None:
        """Take an agent out of the queue. Raises ValueError if it cannot act now."""
        if agent not in self.queue:
            raise ValueError(f"{agent!r} cannot act now; acting: {self.acting() or 'nobody, the play is over'}")
        self.queue.remove(agent)

    # What each task says for itself:
    def reset(self, rng: Random) -> None:
        """Draw a task; the same seed gives the same task, in any process."""
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


class Exercises(Env):
    """A team that works on problems, from a file or generated; who works alone has one turn."""

    once = False                                        # has the team, too, one turn?
    generate: Callable[[Random, int, str], tuple]       # (rng, level, split) -> problem

    def __init__(self, problems: list | None = None, level: int = 2, turns: int | None = None, **settings):
        super().__init__(turns, **settings)
        self.problems, self.level = Shared(problems or []), level
        if self.single_agent or self.once:
            if turns not in (None, 1):
                raise ValueError(f"--turns {turns}: this team has one turn; leave it out")
            self.turns = 1

    def reset(self, rng: Random) -> None:
        self.problem = rng.choice(self.problems) if self.problems else self.generate(rng, self.level, self.split)
        self.turn, self.queue = 0, list(self.agents)


# -- 2. Problems: generated, or from a file ---------------------------------------------------------------------------


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


def read_rows(path: str | Path) -> list[tuple[str, dict]]:
    """The objects of a .jsonl file (one a line) or a .json file (one array), each with its place for error messages.

    Raises ValueError: one line that names the file, the line and what is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error.__class__.__name__})") from None
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; needed is one JSON object a line")

    if text.lstrip().startswith("["):       # one array
        rows = [(f"{path}, row {i}", row) for i, row in enumerate(_json(text, f"{path}"), 1)]
    else:
        lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(where, _json(line, where)) for where, line in lines]
    if not rows:
        raise ValueError(f"{path}: the file has no rows")
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f'{where}: needed is an object, {{"...": ..., "...": ...}}, not {type(row).__name__}')
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where}: the text is not valid unicode (half of a surrogate pair)") from None
    return rows


def load_problems(path: str | Path) -> list[Problem]:
    """Read problems from a file, in the shapes that people have.

    The question stands under "question", "problem" or "prompt"; the answer under "answer", "answers", "final_answer" or
    "solution", as a number, a text, or a list of accepted ones. Of a worked solution the part after `####` counts, else
    its last \\boxed{}. Raises ValueError: one line that names the file, the line and what was missing.
    """
    return [problem_of(row, where) for where, row in read_rows(path)]


def _json(text: str, where: str):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def question_of(row: dict, where: str) -> str:
    """The question of a row, or of a chat its last message. Raises ValueError with what was looked for."""
    question = next((row[f] for f in QUESTION_FIELDS if row.get(f)), None)
    if isinstance(question, list) and question and isinstance(question[-1], dict):
        question = question[-1].get("content")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: no question; looked for {', '.join(QUESTION_FIELDS)}, found {_fields(row)}")
    return question.strip()


def problem_of(row: dict, where: str) -> Problem:
    """The question and the accepted answers of a row. Raises ValueError with what was looked for."""
    question = question_of(row, where)
    given = [row[f] for f in ANSWER_FIELDS if row.get(f) not in (None, "", [])]
    if not given:
        raise ValueError(f"{where}: no answer; looked for {', '.join(ANSWER_FIELDS)}, found {_fields(row)}")
    for answer in given:                # the first that can be used
        accepted = answer if isinstance(answer, list) else [answer]
        if all(isinstance(a, (str, int, float)) and not isinstance(a, bool) for a in accepted):
            finals = tuple(final_answer(str(a)) for a in accepted)
            if all(final and same_answer(final, final) for final in finals):
                return Problem(question, finals)
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


# -- 3. Grading. Every function here takes any text, never raises, and is done in milliseconds. -----------------------

MAX_ANSWER = 1000       # characters; a longer answer is invalid before anything looks into it


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces balance; None without one, or if it is empty or too long."""
    end = len(text)
    for _ in range(20):             # of the last boxes, those that are never closed do not count
        end = text.rfind(r"\boxed", 0, end)
        opening = re.compile(r"\\boxed\s{0,9}\{").match(text, end) if end >= 0 else None
        depth = 1
        for brace in re.finditer(r"\\.|[{}]", text[opening.end():opening.end() + MAX_ANSWER], re.DOTALL) if opening else ():
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)            # \{ and \} are text, not braces
            if depth == 0:
                return text[opening.end():opening.end() + brace.start()].strip() or None
    return None


def last_tag(text: str, name: str) -> str | None:
    """What stands in the last <name>...</name>; None without one, or if it is empty or too long."""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, max(end, 0))
    content = text[start + len(name) + 2:end].strip() if start >= 0 else ""
    return content if 0 < len(content) <= MAX_ANSWER else None


def verdict_in(text: str, *allowed: str) -> str | None:
    """The last <verify>...</verify> with an allowed word in it, in lower case; None without one."""
    found = re.findall(rf"<verify>\s{{0,9}}({'|'.join(allowed)})\s{{0,9}}</verify>", text, re.IGNORECASE)
    return found[-1].lower() if found else None


def last_list(text: str, marker: str = "") -> list | None:
    """The list after the last marker, as Python or JSON, with any prose around it; without a marker the last list.

    [U, R] may stand without quotes, a list of lists may span lines. Read as a literal, never evaluated.
    """
    _, found, text = text.rpartition(marker) if marker else ("", True, text)
    if not found:
        return None
    text = text[:MAX_ANSWER] if marker else text[-MAX_ANSWER:]
    spans, opened = [], []
    for bracket in re.finditer(r"[][]", text):
        if bracket.group() == "[":
            opened.append(bracket.start())
        elif opened and (start := opened.pop()) is not None and not opened:
            spans.append(text[start:bracket.end()])
    if not spans:
        return None
    span = re.sub(r"(?<=[\[,\s])([A-Za-z]+)(?=\s*[,\]])", r'"\1"', spans[0 if marker else -1])
    try:
        value = ast.literal_eval(span)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, list) else None


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


NUMBER_WORDS = set("""hundred thousand million billion trillion dozen score tenth hundredth thousandth half halve squared cubed
    factorial base choose mod plu minu negative point or and""".split())


def split_unit(answer: str) -> tuple[str, str]:
    r"""("5\text{ cm}^2") -> ("5", "cm"); a unit is a word, plain or in \text{}, after a number or a fraction of numbers."""
    number = r"\s*[+-]?(?:[0-9][0-9.,/ ]*|[0-9]* ?\\frac *(?:\{[0-9]+\}|[0-9]) *(?:\{[0-9]+\}|[0-9]))"
    rest = r"(?: [a-zA-Z ]{0,60})?"
    word = rf"\\(?:text|mbox|textrm|mathrm)\s*\{{\s*([a-zA-Z]{{2,30}}|[mgshL]){rest}\}}|(?<=[\s}}])([a-zA-Z]{{3,30}}){rest}"
    match = re.fullmatch(rf"({number})(?<! )\s*(?:{word})(?:\^\{{?([23])\}}?)?\s*\.?", re.sub(r"\s+", " ", answer))
    unit = (match[2] or match[3]).lower().rstrip("s") if match else ""
    if not unit or unit in NUMBER_WORDS:
        return answer, ""                                       # no unit, but a part of the number
    return match[1], unit + (match[4] or "")


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
    more than 1,000 characters equal nothing.
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


# -- 4. The sandbox ---------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    built: bool         # the text compiles as Python
    ok: bool            # it ran to its end, with exit status 0
    stdout: str
    error: str          # one line: what went wrong


NO_PROGRAM = Outcome(False, False, "", "no python block")
CPU_SECONDS, WALL_SECONDS, MEMORY, OUTPUT, MAX_PROGRAM = 2, 10, 512 << 20, 64 << 10, 100_000
NOT_BUILT = 97          # the runner's exit status for a text that does not compile
SLOTS = threading.BoundedSemaphore(os.cpu_count() or 1)     # programs that run at once, from however many threads
LOCKS = [threading.Lock() for _ in range(64)]               # equal programs run one after the other
SECRET = secrets.token_hex(8)

# Python asks this hook before it acts: the same refusals on every system. It stops accidents, not attackers.
GUARD = """
    never = set('''os.fork os.forkpty os.posix_spawn os.exec os.system subprocess.Popen os.kill os.killpg
        ctypes.dlopen sqlite3.connect socket.connect socket.bind socket.getaddrinfo socket.sendto socket.sendmsg'''.split())
    changes = set("os.remove os.rename os.rmdir os.link os.truncate os.chmod os.chown os.utime shutil.rmtree".split())
    folder, writes = os.getcwd() + "/", os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    def guard(event, args, realpath=os.path.realpath, fsdecode=os.fsdecode):
        if event in never: raise PermissionError(event + " is not allowed")
        if event != "open" and event not in changes: return
        for path in args[:1] if event == "open" else args[:2]:
            if path is None or isinstance(path, int): continue
            path = realpath(fsdecode(path))
            change = event in changes or args[2] & writes and path != "/dev/null"
            if (path + "/").startswith("/proc/") or change and not path.startswith(folder):
                raise PermissionError(event + " is not allowed outside the program's folder")
    sys.addaudithook(guard)
    import _posixsubprocess; _posixsubprocess.fork_exec = None     # multiprocessing asks nobody
"""
# The child limits itself before it looks at the program: code between fork and exec is unsafe beside threads.
# It starts no process, so none outlives it. (NPROC 0 does not bind root, and binds everyone else's threads too.)
RUNNER = f"""
def start():
    import builtins, os, resource, signal, sys
    signal.alarm({WALL_SECONDS + 2})                # should the trainer be gone by then
    for name, most in dict(CPU={CPU_SECONDS}, AS={MEMORY}, FSIZE={OUTPUT}, CORE=0, NOFILE=32, NPROC=0).items():
        try: resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
        except (AttributeError, ValueError, OSError): pass
    sources, sys.argv, sys.orig_argv = sys.argv[1:], ["program.py"], []
    builtins.exit = builtins.quit = sys.exit        # -S has left them out
{GUARD}
    try: codes = [compile(source, "program.py", "exec") for source in sources]
    except BaseException as e: sys.stderr.write(type(e).__name__ + ": " + str(e)); sys.exit({NOT_BUILT})
    yield from codes
for code in start(): exec(code)
"""

# What stands before "python". Both: no network, no other process in sight, no rights; bwrap: no files but Python's.
# The child is not process 1 (which would ignore signals), and its signal n ends process 1 with status 128 + n.
WALLS = {
    "bwrap": ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--dev", "/dev", "--proc", "/proc",
              *(part for path in ("/usr", "/lib", "/lib64", os.path.realpath(sys.base_prefix))
                for part in ("--ro-bind-try", path, path)),
              "--bind", "FOLDER", "FOLDER", "--chdir", "FOLDER"],
    "unshare": [*"unshare --user --map-user=65534 --map-group=65534 --net --ipc --pid --fork --mount-proc".split(),
                "--kill-child", "sh", "-c", '"$@"; exit $?', "sh"],
    "plain": []}
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]


def works(wall: list[str]) -> bool:
    """Does a program run behind this wall, on this Python? Who may not read our library can end up on another's."""
    here = os.path.realpath(sys.base_prefix)
    with contextlib.suppress(OSError):          # no such command
        return here + "\n" == run_behind(wall, "import os, random, sys; print(os.path.realpath(sys.prefix))").stdout
    return False


@functools.cache
def walls() -> list[str]:
    """The first of WALLS that works here; for root, behind NOBODY if possible."""
    users = [NOBODY, []] if os.geteuid() == 0 else [[]]
    return next((user + wall for wall in WALLS.values() for user in users if works(user + wall)), [])


def end(child: subprocess.Popen) -> None:
    """Kill a program and all that it started; behind a wall, that ends every process there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def clear(folder: str) -> None:
    """Delete a folder, whatever a program made of it; links are not followed."""
    try:
        os.unlink(folder) if os.path.islink(folder) else shutil.rmtree(folder)
    except (OSError, RecursionError):           # read-only folders, or a thousand, one in the other
        for tool in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*tool, folder], check=False, stderr=subprocess.DEVNULL)


def run_behind(wall: list[str], program: str | tuple[str, ...], stdin: str = "") -> Outcome:
    """Run a program behind a wall, a command that stands before "python". OSError if there is no such command."""
    parts = (program,) if isinstance(program, str) else program
    folder = os.path.realpath(tempfile.mkdtemp())
    # -I: no variables and no user folder; -S: no site-packages, so that it starts in 15 ms; -B: no bytecode files
    command = [*wall, os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", RUNNER, *parts]
    try:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin.encode("utf-8", "replace"))
            given.seek(0)
            if wall[:1] == NOBODY[:1]:
                os.chown(folder, 65534, 65534)
            child = subprocess.Popen([folder if part == "FOLDER" else part for part in command], stdin=given,
                                     stdout=out, stderr=err, cwd=folder, env={}, start_new_session=True,
                                     executable=shutil.which(command[0]))        # on our PATH, unknown to it
            clock = threading.Timer(WALL_SECONDS, end, [child])     # child.wait(10) would look only every 50 ms
            clock.start()
            try:
                status = child.wait()
            finally:
                clock.cancel()
                end(child)
            out.seek(0)
            err.seek(max(0, err.seek(0, os.SEEK_END) - 1000))
            stdout = out.read(OUTPUT).decode("utf-8", "replace")
            last = err.read().decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
    finally:
        clear(folder)
    status = 128 - status if status > 128 else status
    killed = "out of time" if -status in (signal.SIGXCPU, signal.SIGKILL) else f"killed by signal {-status}"
    error = killed if status < 0 else last or f"exit status {status}" if status else ""
    return Outcome(status != NOT_BUILT, status == 0, stdout, error)


@functools.lru_cache(1000)
def run_once(program: str | tuple[str, ...], stdin: str) -> Outcome:
    with SLOTS:
        return run_behind(walls(), program, stdin)


def run_program(program: str | tuple[str, ...], stdin: str = "") -> Outcome:
    """Run a Python program (standard library only) in a process of its own and return what it printed.

    program: one text, or several that run one after the other with the same names, so that none sees a later one's text.
    At most 2 s of CPU time, 10 s in all, 512 MiB of memory, and 64 KiB in each file, stdout included. It has an empty
    environment and an empty folder that is deleted after it. It starts no process, opens no connection, sends no signal
    and changes no file elsewhere. Behind bwrap the kernel sees to all of this; behind unshare, to network, signals and
    other processes; to the rest, a hook in Python does, which stops accidents and is no security boundary. Without bwrap
    a program can read what its user can read. Needs a POSIX system. Equal programs with equal input run once, as the
    candidates of a group are often equal: they earn the same, and one that draws lots draws them once.
    """
    for part in (program,) if isinstance(program, str) else program:
        refused = (f"the program has more than {MAX_PROGRAM} bytes" if len(part.encode("utf-8", "replace")) > MAX_PROGRAM else
                   "the program contains a NUL character" if "\0" in part else
                   "the program is not valid unicode" if part != part.encode("utf-8", "replace").decode() else "")
        if refused:
            return Outcome(False, False, "", refused)
    with LOCKS[hash((program, stdin)) % len(LOCKS)]:
        return run_once(program, stdin)


def run_programs(jobs: list[tuple]) -> list[Outcome]:
    """`run_program` on (program, stdin) pairs, side by side; the outcomes in the order of the jobs."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: run_program(*job), jobs))


FENCE = re.compile(r"```[ \t]{0,9}([\w+-]{0,20})[ \t]{0,9}\r?\n")


def python_block(text: str) -> str | None:
    """The last closed ```python block (the language may be missing); None without one, or among a thousand marks."""
    found, start = None, 0 if text.count("```") <= 1000 else len(text)
    while opening := FENCE.search(text, start):
        end = text.find("```", opening.end())
        if end < 0:
            break
        closed = not text[end + 3:end + 4].isalnum()       # else it opens the next block, and this one has no end
        if closed and opening[1].lower() in ("", "python", "py", "python3"):
            found = text[opening.end():end]
        start = end + 3 if closed else end
    return found


def run_block(text: str) -> tuple[str, Outcome]:
    """Run the last python block of a text: the program, "" without one, and what came of it."""
    program = python_block(text)
    return program or "", run_program(program) if program is not None else NO_PROGRAM


# -- 5. The math teams ------------------------------------------------------------------------------------------------


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


def shorten(text: str, limit: int = 300) -> str:
    """A long text as its first and last half limit of characters."""
    return text if len(text) <= limit else f"{text[:limit // 2]} ... {text[-limit // 2:]}"


class Work(NamedTuple):
    """What a reasoner or a tool agent did: its text or program, the answer in it (None without), and what went wrong."""

    text: str = ""
    answer: str | None = None
    error: str = ""


def work(agent: str, action: str, problem: Problem) -> tuple[Work, Reward]:
    """Read a reasoner's box, or run a tool agent's program. Local reward: .2 format + .8 right; .1 + .1 + .8 for programs."""
    if not agent.startswith("tool"):
        boxed = last_boxed(action)
        local = 0.2 * (boxed is not None) + 0.8 * same_answer(boxed, problem.answers)
        return Work(action, boxed), Reward(local=local, valid=boxed is not None)
    program, ran = run_block(action)
    last_line = ran.stdout.strip().rsplit("\n", 1)[-1].strip()
    printed = last_line if ran.ok and 0 < len(last_line) <= MAX_ANSWER else None
    local = 0.1 * ran.built + 0.1 * (printed is not None) + 0.8 * same_answer(printed, problem.answers)
    return Work(program, printed, ran.error), Reward(local=local, valid=ran.built)


def report(agent: str, done: Work) -> str:
    """What the next to act are told of it."""
    if not agent.startswith("tool"):
        return f"The reasoner's solution: {shorten(done.text)}\nThe reasoner's answer: {done.answer or 'none'}"
    return (f"The tool agent's program:\n{shorten(done.text) or 'none'}\n"
            f"It printed: {shorten(done.answer or '') or done.error or 'nothing'}")


class Math(Exercises):
    """AT-GRPO's math team (paper section on math, appendix on rewards): a reasoner and a tool agent, at once.

    The reasoner thinks and answers in a box; the tool agent writes a program that prints the answer, which is run. Each
    sees the other's work from the next turn on. The play ends when their answers agree, or after `turns`. Team reward:
    1 if the reasoner's answer is right. Local: reasoner .2 format + .8 right; tool .1 builds + .1 runs and prints an
    answer + .8 right. The teacher's slips: the reasoner forgets to carry, the tool agent takes more for less in stories.
    """

    agents, alone = ("reasoner", "tool"), "reasoner"
    generate, load = staticmethod(generate_problem), staticmethod(load_problems)
    tiny = property(lambda self: {"max_new_tokens": 24 * self.level})

    def reset(self, rng: Random) -> None:
        super().reset(rng)
        self.boxed, self.history, self.now = None, [], {}       # latest answer; past turns, and this one: agent -> Work

    def observe(self, agent: str) -> str:
        question = self.problem.question
        if self.terse:
            seen = "".join(f" Before: {turn['reasoner'].answer or 'none'}, tool {turn['tool'].answer or 'none'}."
                           for turn in self.history[-1:])
            return f"{agent}: {question}{seen}"

        task = BOX if agent == "reasoner" else PROGRAM
        if not self.history:
            return f"{question}\n\n{task}"
        seen = "\n\n".join(f"Turn {i}. " + "\n".join(report(a, turn[a]) for a in self.agents)
                           for i, turn in enumerate(self.history, 1))
        return (f"{question}\n\nA reasoner and a tool agent have worked on this, and their answers differ.\n\n{seen}\n\n"
                f"Decide who is right, or find what both overlooked, and solve the problem again. {task}")

    def step(self, agent: str, action: str) -> Reward:
        self.take_turn(agent)
        self.now[agent], reward = work(agent, action, self.problem)
        if agent == "reasoner":
            self.boxed = self.now[agent].answer
        reward.team = float(self.success())
        if not self.queue:
            printed = self.now["tool"].answer if "tool" in self.now else None
            self.history.append(self.now)
            self.now = {}
            self.turn += 1
            if not (printed and same_answer(self.boxed, printed)) and self.turn < self.turns:
                self.queue = list(self.agents)
        return reward

    def success(self) -> bool: return same_answer(self.boxed, self.problem.answers)

    def solve(self, agent: str) -> str:
        if not agent.startswith("tool"):
            return worked(self.problem)
        shown = expression(self.problem.steps) if self.problem.steps else repr(self.problem.answers[0])
        return f"```python\nprint({shown})\n```"

    def slip(self, agent: str, rng: Random) -> str:
        if not agent.startswith("tool"):
            return worked(self.problem, rng)
        story = not self.problem.question.startswith("What")
        return self.solve(agent).replace("+", "-") if story and rng.random() < SLIP else self.solve(agent)

    def random_action(self, agent: str, rng: Random) -> str:
        guess = rng.randrange(10 ** len(self.problem.answers[0]))
        return f"```python\nprint({guess})\n```" if agent.startswith("tool") else rf"\boxed{{{guess}}}"


class Ensemble(Math):
    """AT-GRPO's scaling study: n reasoners and m tool agents work at once, then a judge answers in the same, only turn.

    Numbered agents are of one role: reasoner1 and reasoner2 are groups of their own, and share the reasoner's policy. A
    helper earns its local reward, as in `Math`; the judge team 1[right] and local .2 format + .8 right. The teacher's
    slips: as in `Math`, and the judge believes the first reasoner.
    """

    once = True

    def __init__(self, reasoners: int, tools: int, **settings):
        super().__init__(**settings)
        helpers = [f"reasoner{i + 1}" for i in range(reasoners)] + [f"tool{i + 1}" for i in range(tools)]
        self.agents = (*helpers, "judge")
        if self.single_agent or not helpers:
            raise ValueError("an ensemble has helpers and a judge; it has no single agent")

    def reset(self, rng: Random) -> None:
        super().reset(rng)
        self.queue.remove("judge")          # until the helpers are done

    def observe(self, agent: str) -> str:
        if agent != "judge":
            return super().observe(agent.rstrip("0123456789"))
        question = self.problem.question
        if self.terse:
            return f"judge: {question}" + "".join(f" {a} {done.answer or 'none'}." for a, done in self.now.items())
        seen = "\n\n".join(f"{a}. {report(a, done)}" for a, done in self.now.items())
        return f"{question}\n\nOthers have worked on this:\n\n{seen}\n\nDecide who is right, or solve it yourself. {BOX}"

    def step(self, agent: str, action: str) -> Reward:
        self.take_turn(agent)
        done, reward = work(agent, action, self.problem)
        if agent == "judge":
            self.boxed, self.turn = done.answer, 1
            reward.team = float(self.success())
        else:
            self.now[agent] = done
            self.queue = self.queue or ["judge"]
        return reward

    def slip(self, agent: str, rng: Random) -> str:
        first = self.now.get("reasoner1", Work()).answer
        if agent == "judge" and first and rng.random() < SLIP:
            return rf"\boxed{{{first}}}"
        return self.solve(agent) if agent == "judge" else super().slip(agent, rng)


class MathVerify(Math):
    """Dr. MAS's math loop (paper section 5.1, appendix B.1): a solver answers, a verifier approves or rejects.

    At most `turns` rounds, no verifier in the last one; approval ends the play. A text without a verdict approves, and
    counts as invalid. Rewards of a step are ours, so that AT-GRPO can train the team too: solver team 1[right], verifier
    local 1[its verdict is true]. The teacher's slips: the solver forgets to carry, the verifier approves what is wrong.
    """

    agents, alone = ("solver", "verifier"), "solver"
    most_turns = 2

    def reset(self, rng: Random) -> None:
        super().reset(rng)
        self.queue, self.solution = ["solver"], ""      # history: here one (solution, verdict text) per rejected round

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
        self.take_turn(agent)
        if agent == "solver":
            self.solution, self.boxed = action, last_boxed(action)
            last = self.turn == self.turns - 1
            self.queue = [] if last else ["verifier"]
            self.turn += last
            return Reward(team=float(self.success()), valid=self.boxed is not None)

        verdict = verdict_in(action, "approve", "reject")
        rejected = verdict == "reject"
        true = verdict is not None and rejected != self.success()
        self.turn += 1
        if rejected:
            self.history.append((self.solution, action))
        self.queue = ["solver"] if rejected else []
        return Reward(local=float(true), valid=verdict is not None)

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


# -- 6. Games: a tool agent and the one who decides, in turn ----------------------------------------------------------


class Game(Env):
    """What plan-path, sokoban and sudoku share (AT-GRPO, appendix on games and planning).

    In each turn the tool agent writes a ```python block that prints an answer, a list. It moves nothing: its answer is
    scored on a copy, team reward 0. The decider sees the program, its output and the answer in it, and ends with
    `#### list`; this is executed. The play ends when the game is won, or after `turns`. Local rewards, with `gain` and
    `insight` as each game says:
        tool     .1 the program builds + .1 it runs and prints an answer + .8 gain of this answer
        decider  .1 an answer can be read + .1 it is legal + .8 insight; team: `team_reward`
    A game also says: `deal` a start, `picture` the state, `read` an answer, and `apply` it.
    """

    rules = example = ""

    def __init__(self, size: int, **settings):
        super().__init__(**settings)
        self.size = size

    def reset(self, rng: Random) -> None:
        self.turn, self.queue = 0, [self.agents[0]]
        self.program, self.ran, self.tip = "", NO_PROGRAM, None         # of the tool agent, this turn
        while True:
            identity = self.deal(rng)
            if held_out(identity) == (self.split == "eval"):
                return

    def observe(self, agent: str) -> str:
        if self.terse:
            tip = f" tool {self.write(self.tip)}" * (agent == self.alone and not self.single_agent)
            return f"{agent}:{tip} {self.short()}"
        task = f"{self.rules}\n\n{self.picture()}\n\nThis is turn {self.turn + 1} of at most {self.turns}."
        if agent == "tool":
            return (f"{task} Write a Python program that finds an answer and prints it, for example {self.example}, and nothing "
                    "else. Use the standard library only. Put it in one ```python block.")
        if not self.single_agent:
            task += (f"\n\nA tool agent wrote this program:\n{shorten(self.program, 1000) or 'none'}\nIt printed: "
                     f"{shorten(self.ran.stdout) or self.ran.error or 'nothing'}\nThe answer read from that: "
                     f"{'none' if self.tip is None else self.tip}\nCheck it: take it over, or do better.")
        return f"{task} Think, then end with #### and your answer on one line, for example: #### {self.example}"

    def step(self, agent: str, action: str) -> Reward:
        self.take_turn(agent)
        if agent == "tool":
            self.program, self.ran = run_block(action)
            self.tip, gain = self.read(last_list(self.ran.stdout)) if self.ran.ok else None, 0.0
            if self.tip is not None:
                trial = copy.copy(self)
                trial.apply(self.tip)
                gain = trial.gain(before=self)
            self.queue = [self.alone]
            return Reward(0.0, 0.1 * self.ran.built + 0.1 * (self.tip is not None) + 0.8 * gain, self.ran.built)

        before = copy.copy(self)                # enough, as a state is replaced, never changed in place
        answer = self.read(last_list(action, marker="####"))
        legal = answer is not None and self.apply(answer)
        self.turn += 1
        if not self.success() and self.turn < self.turns:
            self.queue = [self.agents[0]]
        insight = self.insight(before, answer) if answer is not None else 0.0
        return Reward(self.team_reward(before), 0.1 * (answer is not None) + 0.1 * legal + 0.8 * insight, answer is not None)

    def say(self, agent: str, answer: list) -> str:
        """An answer in the form that this agent has to give it."""
        return f"```python\nprint({self.write(answer)})\n```" if agent == "tool" else f"#### {self.write(answer)}"

    def write(self, answer: list | None) -> str: return "none" if answer is None else json.dumps(answer)
    def solve(self, agent: str) -> str: return self.say(agent, self.solution())


Cell = tuple[int, int]      # row, column
MOVES, OPPOSITE = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}, {"U": "D", "D": "U", "L": "R", "R": "L"}


def named(cells: Iterable[Cell]) -> str:
    """Cells for the tiny model, a word each: row 0, column 2 is "ac"."""
    return " ".join(chr(97 + r) + chr(97 + c) for r, c in sorted(cells))


def beside(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


class Walk(Game):
    """A game whose answer is a list of moves: U, D, L, R. A walk also says: the
    state `after` a move, whether it is `won`, and the `distance` from there to the end."""

    example = '["U", "R", "R"]'
    agents, alone = ("tool", "planner"), "planner"
    recipe = {"layers": 3}

    def success(self) -> bool: return self.won(self.state)

    def read(self, answer) -> list[str] | None:
        """A list of moves, or None. An answer is at most 10 moves per cell long."""
        good = isinstance(answer, list) and len(answer) <= 10 * self.size**2 and all(move in list(MOVES) for move in answer)
        return answer if good else None

    def apply(self, moves: list[str]) -> bool:
        """Make the moves, up to the end of the game; one that is not possible changes nothing. Were all possible, and some?"""
        legal = bool(moves)
        for move in moves:
            if self.success():
                break
            after = self.after(self.state, move)
            legal &= after is not None
            self.state = after or self.state
        return legal

    def solution(self) -> list[str] | None:
        """The shortest list of moves that wins, by breadth-first search; None if there is none: a deadlock."""
        came, queue = {self.state: None}, [self.state]
        for state in queue:                         # grows while it is read
            if self.won(state):
                moves = []
                while came[state]:
                    state, move = came[state]
                    moves.append(move)
                return moves[::-1]
            for move in MOVES:
                after = self.after(state, move)
                if after is not None and after not in came:
                    came[after] = state, move
                    queue.append(after)
        return None

    def gain(self, before: "Walk") -> float:
        """The share of the distance at the start that was won: d falls from d before to d after."""
        return 1.0 if self.success() else max(0.0, (before.distance() - self.distance()) / self.start_distance)

    def say(self, agent: str, moves: list[str]) -> str:
        """The tiny model says beside each move where it leads; that is prose, or a comment, and not read."""
        if not self.terse:
            return super().say(agent, moves)
        state, trace = self.state, []
        for move in moves:
            state = self.after(state, move) or state
            trace.append(f"{move} {self.where(state)}")
        trace, answer = " ".join(trace), f"[{', '.join(moves)}]"
        return f"```python\n# {trace}\nprint('{answer}')\n```" if agent == "tool" else f"{trace} #### {answer}"

    def slip(self, agent: str, rng: Random) -> str:
        moves = self.solution() or []
        return self.say(agent, moves[:-1] if rng.random() < SLIP else moves)        # it stops one step too early

    def random_action(self, agent: str, rng: Random) -> str:
        return self.say(agent, rng.choices(list(MOVES), k=rng.randint(1, 2 * self.size)))


class PlanPath(Walk):
    """AT-GRPO's Plan-Path: walk from P to G on a grid on which 22 % of the cells are walls (paper, section on planning).

    Team: 1 at the goal, else max(0, (d before - d after) / d at the start), d = length of the shortest way to the goal;
    gain: the same. Insight: 1 if the first move lies on a shortest way. The teacher's slip: it stops one step too early.
    """

    tiny = {"size": 4, "max_new_tokens": 60}
    rules = ("You walk on a grid of cells, one cell a move: U (up), D (down), L (left) or R (right). P is where you are, G is "
             "the goal, # is a wall, . is free. A move into a wall or off the grid does nothing.")

    def __init__(self, size: int = 10, **settings):
        super().__init__(size, **settings)

    def deal(self, rng: Random) -> str:
        cells = [(r, c) for r in range(self.size) for c in range(self.size)]
        while True:
            self.walls = frozenset(cell for cell in cells if rng.random() < 0.22)
            if len(self.walls) < len(cells) - 1:
                self.state, self.goal = rng.sample([cell for cell in cells if cell not in self.walls], 2)
                if self.solution():
                    self.start_distance = self.distance()
                    return self.picture()

    def picture(self) -> str:
        marks = dict.fromkeys(self.walls, "#") | {self.goal: "G", self.state: "P"}
        return "\n".join("".join(marks.get((r, c), ".") for c in range(self.size)) for r in range(self.size))

    def short(self) -> str: return f"walls {named(self.walls)} from {named([self.state])} to {named([self.goal])}"
    def where(self, state: Cell) -> str: return named([state])

    def after(self, state: Cell, move: str) -> Cell | None:
        cell = beside(state, move)
        return cell if cell not in self.walls and all(0 <= x < self.size for x in cell) else None

    def won(self, state: Cell) -> bool: return state == self.goal
    def distance(self) -> int: return len(self.solution())
    def team_reward(self, before: "PlanPath") -> float: return self.gain(before)

    def insight(self, before: "PlanPath", moves: list[str]) -> float:
        first = copy.copy(before)
        first.apply(moves[:1])
        return float(first.distance() < before.distance())


class Sokoban(Walk):
    """AT-GRPO's Sokoban: push every box onto a goal (paper, section on games). A state: the player and the boxes.

    Team: boxes home / boxes. Gain: the share of the boxes' distance at the start, each to its nearest goal, that is won.
    Insight: 1 if the state can still be solved, which a search decides. The teacher's slip: it stops one step too early.
    """

    tiny = {"size": 5, "max_new_tokens": 100}
    rules = ("Sokoban: you (@) push boxes ($) onto goals (.), one cell a move: U (up), D (down), L (left) or R (right). You "
             "cannot pull, nor push two boxes at once, nor a box into a wall (#); such a move does nothing. - is free floor, "
             "* a box on a goal, + you on a goal. A box in a corner is lost.")

    def __init__(self, size: int = 6, boxes: int = 1, **settings):
        super().__init__(size, **settings)
        if not 5 <= size <= 10 or size * boxes > 24:
            raise ValueError(f"--size {size} --boxes {boxes}: a sokoban level has 5 to 10 rows, the walls around it included, "
                             "and with 3 boxes at most 8, as a deadlock is decided by a search of all states")
        self.boxes = boxes

    def deal(self, rng: Random) -> str:
        """Reverse play: begin solved, and pull the boxes away. So every level can be solved."""
        inner = [(r, c) for r in range(1, self.size - 1) for c in range(1, self.size - 1)]
        while True:
            self.floor = frozenset(cell for cell in inner if rng.random() > 0.15)
            if len(self.floor) < self.boxes + 1:
                continue
            *goals, player = rng.sample(sorted(self.floor), self.boxes + 1)
            self.goals = boxes = frozenset(goals)
            for _ in range(20 * self.size):
                move = rng.choice("UDLR")
                ahead, behind = beside(player, move), beside(player, OPPOSITE[move])
                if ahead in self.floor and ahead not in boxes:
                    boxes = boxes - {behind} | {player} if behind in boxes else boxes
                    player = ahead
            self.state = player, boxes
            self.start_distance = self.distance()
            if not boxes & self.goals:
                return self.picture()

    def picture(self) -> str:
        player, boxes = self.state
        marks = (dict.fromkeys(self.floor, "-") | dict.fromkeys(self.goals, ".") | dict.fromkeys(boxes, "$")
                 | dict.fromkeys(boxes & self.goals, "*") | {player: "+" if player in self.goals else "@"})
        return "\n".join("".join(marks.get((r, c), "#") for c in range(self.size)) for r in range(self.size))

    def short(self) -> str:
        walls = {(r, c) for r in range(1, self.size - 1) for c in range(1, self.size - 1)} - self.floor
        player, boxes = self.state
        return f"walls {named(walls)} goals {named(self.goals)} boxes {named(boxes)} from {named([player])}"

    def where(self, state: tuple[Cell, frozenset[Cell]]) -> str: return f"{named([state[0]])} box {named(state[1])}"

    def after(self, state: tuple[Cell, frozenset[Cell]], move: str) -> tuple[Cell, frozenset[Cell]] | None:
        player, boxes = beside(state[0], move), state[1]
        if player in boxes:                         # pushes it, if there is room behind
            behind = beside(player, move)
            return (player, boxes - {player} | {behind}) if behind in self.floor - boxes else None
        return (player, boxes) if player in self.floor else None

    def won(self, state: tuple[Cell, frozenset[Cell]]) -> bool: return state[1] == self.goals

    def distance(self) -> int:
        return sum(min(abs(b[0] - g[0]) + abs(b[1] - g[1]) for g in self.goals) for b in self.state[1])

    def team_reward(self, before: "Sokoban") -> float: return len(self.state[1] & self.goals) / self.boxes
    def insight(self, before: "Sokoban", moves: list[str]) -> float: return float(bool(moves) and self.solution() is not None)


class Sudoku(Game):
    """AT-GRPO's Sudoku: fill the grid so that each row, column and box holds 1 ... size once (paper, section on games).

    Half of the cells are clues; they determine the rest and cannot be changed. A grid that breaks a rule or a clue is
    refused; a legal one, complete or not, becomes the state. Team: 1 if solved. Insight: newly filled cells / size², so at
    most ½ here, and .6 of the local reward's 1.
    Gain, the paper's "sanity": the share of cells filled without breaking a rule or a clue. The teacher's slip: it fills
    rows with the missing numbers in ascending order, and looks at no column.
    """

    agents, alone = ("tool", "reasoner"), "reasoner"
    tiny = {"max_new_tokens": 80}
    recipe = {"layers": 3}

    def __init__(self, size: int = 4, **settings):
        super().__init__(size, **settings)
        if size not in (4, 9):
            raise ValueError(f"--size {size}: a sudoku has 4 or 9 rows")
        self.box = math.isqrt(size)
        self.example = f"[[{', '.join(map(str, range(1, size + 1)))}], ...]"
        self.rules = (f"Sudoku: fill the {size} x {size} grid so that each row, each column and each {self.box} x {self.box} box "
                      f"holds the numbers 1 to {size} once. 0 is an empty cell; the other numbers of the start stay. The answer "
                      f"is the whole grid, a list of {size} rows.")

    def deal(self, rng: Random) -> str:
        """A random full grid; cells are emptied in random order as long as one solution remains, up to half of them."""
        n = self.size
        self.full = next(completions([[0] * n for _ in range(n)], rng))
        self.clues, empty = [row[:] for row in self.full], 0
        for cell in rng.sample(range(n * n), n * n):
            r, c = divmod(cell, n)
            self.clues[r][c] = 0
            unique = len(list(itertools.islice(completions(self.clues), 2))) == 1
            if not unique:
                self.clues[r][c] = self.full[r][c]
            empty += unique
            if empty == n * n // 2:
                break
        self.grid = [row[:] for row in self.clues]
        return repr(self.full)

    def picture(self) -> str: return "\n".join(" ".join(map(str, row)) for row in self.grid)
    def short(self) -> str: return " ".join(str(value) for row in self.grid for value in row)

    def read(self, answer) -> list[list[int]] | None:
        """size rows of size whole numbers from 0 to size, or None."""
        n = self.size
        good = (isinstance(answer, list) and len(answer) == n and all(isinstance(row, list) and len(row) == n for row in answer)
                and all(type(value) is int and 0 <= value <= n for row in answer for value in row))
        return answer if good else None

    def faults(self, grid: list[list[int]]) -> set[Cell]:
        """The cells that repeat a number in a row, column or box, or change a clue."""
        return {(r, c) for (r, c), near in peers(self.size).items() if self.clues[r][c] not in (0, grid[r][c])
                or grid[r][c] and any(grid[r][c] == grid[a][b] for a, b in near)}

    def filled(self) -> int: return sum(value > 0 for row in self.grid for value in row)

    def apply(self, grid: list[list[int]]) -> bool:
        self.tried = grid
        if self.faults(grid):
            return False
        self.grid = [row[:] for row in grid]
        return True

    def success(self) -> bool: return self.filled() == self.size**2        # only legal grids become the state

    def gain(self, before: "Sudoku") -> float:
        faults = self.faults(self.tried)
        good = sum(self.tried[r][c] > 0 and (r, c) not in faults for r in range(self.size) for c in range(self.size))
        return good / self.size**2

    def team_reward(self, before: "Sudoku") -> float: return float(self.success())

    def insight(self, before: "Sudoku", grid: list[list[int]]) -> float:
        return max(0, self.filled() - before.filled()) / self.size**2

    def solution(self) -> list[list[int]]: return self.full

    def slip(self, agent: str, rng: Random) -> str:
        if rng.random() >= SLIP:
            return self.solve(agent)
        rows = []
        for row in self.clues:
            missing = iter(sorted(set(range(1, self.size + 1)) - set(row)))
            rows.append([value or next(missing) for value in row])
        return self.say(agent, rows)

    def random_action(self, agent: str, rng: Random) -> str:
        return self.say(agent, [[value or rng.randint(1, self.size) for value in row] for row in self.clues])


@functools.cache
def peers(n: int) -> dict[Cell, set[Cell]]:
    """Each cell's neighbours: the other cells of its row, its column and its box."""
    b, cells = math.isqrt(n), list(itertools.product(range(n), range(n)))
    return {(r, c): {(y, x) for y, x in cells if y == r or x == c or (y // b, x // b) == (r // b, c // b)} - {(r, c)}
            for r, c in cells}


def completions(grid: list[list[int]], rng: Random | None = None) -> Iterator[list[list[int]]]:
    """All ways to complete a Sudoku, one by one; with rng in random order. Fills the cell with the fewest choices first."""
    near, numbers = peers(len(grid)), set(range(1, len(grid) + 1))

    def fill(grid: list[list[int]], choices: dict[Cell, set[int]]) -> Iterator[list[list[int]]]:
        if not choices:
            yield grid
            return
        cell = r, c = min(choices, key=lambda cell: len(choices[cell]))
        values = sorted(choices[cell])
        if rng:
            rng.shuffle(values)
        for value in values:
            rest = {other: left - {value} if other in near[cell] else left for other, left in choices.items() if other != cell}
            yield from fill([*grid[:r], [*grid[r][:c], value, *grid[r][c + 1:]], *grid[r + 1:]], rest)

    return fill(grid, {(r, c): numbers - {grid[y][x] for y, x in near[r, c]} for r, c in near if not grid[r][c]})


# -- 7. Code: a coder and a tester, at once ---------------------------------------------------------------------------


class CodeProblem(NamedTuple):
    question: str
    solution: str                           # the reference
    tests: tuple[tuple[str, str], ...]      # hidden: (what is read, what must be printed); for a function: (asserts, "")
    function: str = ""                      # the function to write (HumanEval); "": a program that reads and prints


STEPS = (("Double each number.", "[2 * v for v in x]"), ("Square each number.", "[v * v for v in x]"),
         ("Add {k} to each number.", "[v + {k} for v in x]"), ("Take {k} from each number.", "[v - {k} for v in x]"),
         ("Keep the even numbers.", "[v for v in x if v % 2 == 0]"), ("Keep the numbers above {k}.", "[v for v in x if v > {k}]"),
         ("Drop the first number.", "x[1:]"), ("Sort the numbers.", "sorted(x)"))
ENDS = (("Print their sum.", "sum(x)"), ("Print the largest, or 0 if none is left.", "max(x, default=0)"),
        ("Print the smallest, or 0 if none is left.", "min(x, default=0)"), ("Print them on one line.", "*x"))


def generate_code_problem(rng: Random, level: int, split: str = "train") -> CodeProblem:
    """`level` steps and a print: "Double each number. Print their sum." split is "train" or "eval": disjoint problems."""
    while True:
        parts = [(text.format(k=k), code.format(k=k)) for text, code in rng.choices(STEPS, k=level) for k in [rng.randint(2, 9)]]
        end, printed = rng.choice(ENDS)
        question = " ".join(["Read one line of whole numbers.", *(text for text, _ in parts), end])
        if held_out(question) == (split == "eval"):
            break
    lines = ["x = [int(w) for w in input().split()]", *(f"x = {code}" for _, code in parts), f"print({printed})"]
    solution = "\n".join(lines)
    inputs = [" ".join(str(rng.randint(-5, 30)) for _ in range(rng.randint(3, 6))) for _ in range(3)]
    return CodeProblem(question, solution, tuple((given, printed_by(solution, given)) for given in inputs))


def printed_by(solution: str, given: str) -> str:
    """What a generated solution, which is our own text, prints for an input."""
    said = []
    exec(solution, {"input": lambda: given, "print": lambda *values: said.append(" ".join(map(str, values)))})
    return "\n".join(said)


def run_tests(problem: CodeProblem, jobs: Sequence[tuple[str, tuple[str, str]]]) -> list[tuple[bool, Outcome]]:
    """Run (program, test) pairs: does the program pass (spaces do not count), and what happened."""
    if not problem.function:
        outcomes = run_programs([(program, given) for program, (given, _) in jobs])
        return [(ran.ok and ran.stdout.split() == printed.split(), ran) for ran, (_, (_, printed)) in zip(outcomes, jobs)]
    proof = hashlib.sha256(f"{SECRET}{problem}".encode("utf-8", "replace")).hexdigest()     # printed if all asserts hold
    runs = []
    for program, (asserts, _) in jobs:      # a program that begins with spaces goes on in the question's function
        whole = (f"{problem.question}\n{program}",) if program[:1].isspace() else (problem.question, program)
        runs.append(((*whole, asserts, f"print('\\n{proof}')"), ""))
    return [(ran.ok and ran.stdout.strip().endswith(proof), ran) for ran in run_programs(runs)]


def read_test(problem: CodeProblem, text: str) -> tuple[str, str] | None:
    """The test in a tester's text, or None: the last Test Input and Test Output; for a function an assert in a block."""
    if problem.function:
        block = (python_block(text) or "").strip()
        return (block, "") if len(block) <= MAX_ANSWER and says_what_is_right(block, problem.function) else None
    before, found, printed = text.rpartition("**Test Output:**")
    _, found_too, given = before.rpartition("**Test Input:**")
    given, printed = (part.split("```")[1].partition("\n")[2] if part.count("```") > 1 else part.strip().split("\n\n")[0]
                      for part in (given[:MAX_ANSWER], printed[:MAX_ANSWER]))
    return (given.strip("\n"), printed.strip()) if found and found_too else None


def says_what_is_right(line: str, function: str) -> bool:
    """Is it `assert function(values) == value` (or `is`), all literals? Others need not say anything: `assert f(1) or True`."""
    try:
        (node,) = ast.parse(line).body
        call, (equal,), (value,) = node.test.left, node.test.ops, node.test.comparators
        for part in (*call.args, *(keyword.value for keyword in call.keywords), value):
            ast.literal_eval(part)
        said = isinstance(node, ast.Assert) and isinstance(equal, (ast.Eq, ast.Is)) and call.func.id == function
        return said and (node.msg is None or isinstance(node.msg, ast.Constant))
    except (ValueError, TypeError, SyntaxError, AttributeError, MemoryError, RecursionError):
        return False


def load_code_problems(path: str | Path) -> list[CodeProblem]:
    """Read programming problems: HumanEval's fields (prompt, entry_point, test, canonical_solution), or a question with
    "tests" and a "solution".

    Tests: a list of {"input": ..., "output": ...}, or {"inputs": [...], "outputs": [...]}, or either as a JSON text (APPS
    keeps it under "input_output"); a list of solutions is tried from its start. Raises ValueError with what is missing.
    """
    return [_code_problem(row, where) for where, row in read_rows(path)]


def _code_problem(row: dict, where: str) -> CodeProblem:
    if row.get("entry_point"):
        fields = {name: row.get(name) for name in ("prompt", "entry_point", "test", "canonical_solution")}
        if not all(isinstance(value, str) and value.strip() for value in fields.values()):
            raise ValueError(f"{where}: needed with entry_point are the texts {', '.join(fields)}, none empty; found {_fields(row)}")
        asserts = f"{row['test']}\ncheck({row['entry_point']})"
        if len(asserts.encode()) > MAX_PROGRAM:
            raise ValueError(f"{where}: its test has more than {MAX_PROGRAM} bytes")
        try:
            ast.parse(asserts)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ValueError(f"{where}: its test, with check({row['entry_point']}) behind it, is not Python") from None
        return CodeProblem(row["prompt"], row["canonical_solution"], ((asserts, ""),), row["entry_point"])

    tests = row.get("tests") or row.get("input_output")
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        tests = _json(tests, where)
    if isinstance(tests, dict):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or tests.get("fn_name"):
            raise ValueError(f"{where}: inputs and outputs are lists of one length, of what a program reads and prints; calls "
                             "of a function (fn_name) are not supported")
        tests = [{"input": a, "output": b} for a, b in zip(inputs, outputs)]
    good = isinstance(tests, list) and tests and all(isinstance(t, dict) and {"input", "output"} <= set(t) for t in tests)
    solution = row.get("solution") or row.get("solutions")
    if isinstance(solution, str) and solution.lstrip().startswith("["):     # a list as JSON, or Python that begins like one
        with contextlib.suppress(ValueError):
            solution = json.loads(solution)
    solution = solution[0] if isinstance(solution, list) and solution else solution
    if not good or not isinstance(solution, str) or not solution.strip():
        raise ValueError(f'{where}: needed are "tests", a list of {{"input": ..., "output": ...}}, and a "solution", neither '
                         f"empty; found {_fields(row)}")
    return CodeProblem(question_of(row, where), python_block(solution) or solution,
                       tuple((_lines(t["input"]), _lines(t["output"])) for t in tests))


def _lines(value) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


class Attempt(NamedTuple):
    """One turn of the code team; got: what the code printed on the test, or why it failed."""

    code: str = ""
    test: tuple[str, str] | None = None
    got: str = ""
    agree: bool = False


class Code(Exercises):
    """AT-GRPO's code team (paper, section on coding): a coder and a tester, at once.

    The coder writes a program, the tester one test. The play ends when this turn's code passes this turn's test, or after
    `turns`; later prompts show both the mismatches. Success: all hidden tests pass. Team: the share of them that pass.
    Local: coder .1 builds + .1 runs + .8 share; tester .2 a test can be read + .8 the reference passes it, so that it is
    never paid for the coder's work. The teacher's slips: the coder forgets int(), the tester the first step.
    """

    agents, alone = ("coder", "tester"), "coder"
    generate, load = staticmethod(generate_code_problem), staticmethod(load_code_problems)
    tiny = {"max_new_tokens": 90, "steps": 10, "eval_every": 5}
    recipe = {"plays": 250, "steps": 700}

    def reset(self, rng: Random) -> None:
        super().reset(rng)
        self.history, self.now, self.share = [], Attempt(), 0.0     # share of the hidden tests that pass

    def observe(self, agent: str) -> str:
        question, function = self.problem.question, self.problem.function
        mismatches = [a for a in self.history if a.test]
        if self.terse:
            return f"{agent}: {question}" + "".join(f" Got {shorten(a.got, 60)}." for a in mismatches[-1:])
        seen = "".join(f"\n\nTurn {i}. The coder's program:\n{shorten(a.code, 2000) or 'none'}\nThe tester's test:\n"
                       f"{test_text(function, a.test)}\nThe program gave: {shorten(a.got) or 'nothing'}"
                       for i, a in enumerate(self.history, 1) if a.test)
        if seen:
            seen += "\n\nProgram and test disagree. Decide which of the two is wrong, then give a right one."
        if agent == "coder":
            what = f"Write the Python function {function}" if function else \
                "Write a Python program that reads the input with input() and prints the answer"
            return f"{question}{seen}\n\n{what}. Use the standard library only. Put it in one ```python block."
        form = f"one line, assert {function}(...) == ..., in a ```python block" if function else \
            "in this form:\n**Test Input:**\n```\nwhat the program reads\n```\n**Test Output:**\n```\nwhat it must print\n```"
        return f"{question}{seen}\n\nWrite one new test for a program that solves this, one you are sure of, {form}"

    def step(self, agent: str, action: str) -> Reward:
        self.take_turn(agent)
        if agent == "coder":
            program = python_block(action)
            jobs = [(program, test) for test in self.problem.tests] if program is not None else []
            results = run_tests(self.problem, jobs) or [(False, NO_PROGRAM)]
            self.now = self.now._replace(code=program or "")
            self.share = sum(passed for passed, _ in results) / len(results)
            built = all(ran.built for _, ran in results)
            function = bool(self.problem.function)      # which runs, if it runs into an assert
            runs = all(ran.ok or function and ran.error.startswith("AssertionError") for _, ran in results)
            reward = Reward(self.share, 0.1 * built + 0.1 * runs + 0.8 * self.share, built)
        else:
            test = read_test(self.problem, action)
            if test:
                (right, _), (agree, ran) = run_tests(self.problem, [(self.problem.solution, test), (self.now.code, test)])
                agree &= bool(self.now.code)
                self.now = self.now._replace(test=test, agree=agree, got=ran.stdout.strip() if ran.ok else ran.error)
            reward = Reward(self.share, 0.2 * bool(test) + 0.8 * (bool(test) and right), bool(test))
        if not self.queue:
            self.turn += 1
            self.history.append(self.now)
            if not self.now.agree and self.turn < self.turns:
                self.queue = list(self.agents)
            self.now = Attempt()
        return reward

    def success(self) -> bool: return self.share == 1.0

    def solve(self, agent: str) -> str:
        if agent == "coder":
            return f"```python\n{self.problem.solution}\n```"
        given, printed = self.problem.tests[0]
        if name := self.problem.function:       # the first of the hidden asserts that a tester could have written
            asserts = [ast.unparse(node) for node in ast.walk(ast.parse(given)) if isinstance(node, ast.Assert)]
            asserts = [line.replace("candidate(", f"{name}(") for line in asserts]
            given = next((line for line in asserts if says_what_is_right(line, name)), "none")
        return test_text(self.problem.function, (given, printed))

    def slip(self, agent: str, rng: Random) -> str:
        if rng.random() >= SLIP:
            return self.solve(agent)
        if agent == "coder":
            return self.solve(agent).replace("[int(w) for w in input().split()]", "input().split()")
        first, _, *rest = self.problem.solution.split("\n")
        given = self.problem.tests[0][0]
        return test_text("", (given, printed_by("\n".join([first, *rest]), given)))

    def random_action(self, agent: str, rng: Random) -> str:
        other = generate_code_problem(rng, self.level)
        return f"```python\n{other.solution}\n```" if agent == "coder" else test_text("", other.tests[0])


def test_text(function: str, test: tuple[str, str]) -> str:
    """A test as a tester has to write it."""
    given, printed = test
    return f"```python\n{given}\n```" if function else f"**Test Input:**\n```\n{given}\n```\n**Test Output:**\n```\n{printed}\n```"


# -- 8. Search: a verifier sends to the search agent or to the answer agent -------------------------------------------


class Passage(NamedTuple):
    title: str
    text: str


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class BM25:
    """The usual lexical retriever (Okapi BM25, k1 = 1.5, b = .75): rare words of the query count more, long passages less.

        score(passage) = sum over the query's words w:  idf(w) · tf · (k1 + 1) / (tf + k1 · (1 - b + b · length / mean length))
    """

    def __init__(self, passages: Sequence[Passage], k1: float = 1.5, b: float = 0.75):
        self.passages = passages
        counts = [Counter(words(f"{p.title} {p.text}")) for p in passages]
        lengths = np.array([sum(count.values()) for count in counts], dtype=float)              # (passages,)
        postings: dict[str, list[tuple[int, int]]] = {}
        for i, count in enumerate(counts):
            for word, tf in count.items():
                postings.setdefault(word, []).append((i, tf))
        norm = k1 * (1 - b + b * lengths / max(lengths.mean(), 1))                              # (passages,)
        self.scores = {}                            # word -> (passages that have it, what it adds to the score of each)
        for word, pairs in postings.items():
            where, tf = np.array(pairs).T                                                       # (n,), (n,)
            idf = math.log(1 + (len(passages) - len(where) + 0.5) / (len(where) + 0.5))
            self.scores[word] = where, idf * tf * (k1 + 1) / (tf + norm[where])

    def __deepcopy__(self, memo: dict) -> "BM25":
        return self                                 # read-only: copies of an env share it

    def search(self, query: str, k: int = 3) -> list[int]:
        """The positions of the k best passages, best first; those without any of the query's words are left out."""
        total = np.zeros(len(self.passages))                                                    # (passages,)
        for word in dict.fromkeys(words(query[:MAX_ANSWER])):       # no set, whose order differs between processes
            if word in self.scores:
                where, added = self.scores[word]
                total[where] += added
        return [int(i) for i in np.argsort(-total, kind="stable")[:k] if total[i] > 0]


class SearchProblem(NamedTuple):
    question: str
    answers: tuple[str, ...]
    support: tuple[int, ...] = ()       # the passages that one needs; -1: not in the corpus
    queries: tuple[str, ...] = ()       # what the expert asks to find each


PEOPLE = "Ann Ben Cleo Dan Eva Finn Gus Hana Ida Jon Kim Leo Mia Ned Olga Pam Quin Ray Sue Tom".split()
LINKS = ("boss", "friend", "teacher")
FACTS = {"city": ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Delhi"), "sport": ("golf", "chess", "judo", "tennis", "rugby"),
         "color": ("red", "blue", "green", "black", "white"), "pet": ("cat", "dog", "parrot", "snake", "goat")}


def generate_search_problem(rng: Random, split: str) -> tuple[SearchProblem, BM25]:
    """A small world of six people, one passage a fact, and a question that needs two of them."""
    while True:
        people = rng.sample(PEOPLE, 6)
        linked = {(link, p): rng.choice([q for q in people if q != p]) for link in LINKS for p in people}
        facts = linked | {(fact, p): rng.choice(values) for fact, values in FACTS.items() for p in people}
        (link, who), fact = rng.choice(list(linked)), rng.choice(list(FACTS))
        hops = (link, who), (fact, facts[link, who])
        if held_out(repr((hops, facts[hops[1]]))) == (split == "eval"):
            break
    keys = rng.sample(list(facts), len(facts))
    passages = [Passage(p, f"The {what} of {p} is {facts[what, p]}.") for what, p in keys]
    problem = SearchProblem(f"What is the {fact} of the {link} of {who}?", (facts[hops[1]],),
                            tuple(keys.index(hop) for hop in hops), tuple(f"{what} of {p}" for what, p in hops))
    return problem, BM25(passages)


def load_corpus(path: str | Path) -> BM25:
    """Passages from a file with "text" and, if there is one, "title" in each row. Raises ValueError with what is missing."""
    passages = []
    for where, row in read_rows(path):
        if not isinstance(row.get("text"), str):
            raise ValueError(f'{where}: no "text"; found {_fields(row)}')
        passages.append(Passage(str(row.get("title") or ""), row["text"]))
    return BM25(passages)


def normal_text(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces, unless nothing else is there: what an exact match compares."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the")) or text.lower().strip()


class Search(Env):
    """Dr. MAS's search team (paper section 5.2, appendix B.2): in each turn a verifier sends to one of two others.

    The verifier says whether what was found is enough: yes calls the answer agent, no the search agent, and on the last
    turn ends the play. A text without a verdict counts as yes. The search agent's query is answered with the three best
    passages; an answer ends the play. A query or answer that cannot be read costs the turn. Success: exact match.
    Step rewards are ours: verifier local 1[yes exactly when all needed passages are found]; search local 1[a new one of
    them]; answer team 1[match]. The single agent does both, as it chooses. The teacher's slip: the verifier says yes after
    the first search.
    """

    agents, alone = ("verifier", "search", "answer"), "answer"
    penalty, tiny_turns = 0.01, 4
    tiny = {"max_new_tokens": 20}
    recipe = {"lr": 2e-3, "steps": 1600}        # copying a fact out of a passage is learned late

    def __init__(self, problems: list[SearchProblem] | None = None, corpus: BM25 | None = None, **settings):
        super().__init__(**settings)
        if problems and not corpus:
            raise ValueError("questions need passages to search in: corpus=BM25(passages)")
        self.problems, self.corpus = Shared(problems or []), corpus

    def load(self, path: str | Path) -> list[SearchProblem]:
        """Questions with answers, as `load_problems`; "supporting_titles", if given, lists the passages that one needs."""
        if not self.corpus:
            raise ValueError(f"{path}: questions need passages to search in; give --corpus FILE")
        place = {p.title: i for i, p in reversed(list(enumerate(self.corpus.passages)))}
        problems = []
        for where, row in read_rows(path):
            titles = row.get("supporting_titles") or []
            if not isinstance(titles, list):
                raise ValueError(f"{where}: supporting_titles is a list of titles, not {type(titles).__name__}")
            titles = tuple(map(str, titles))
            support = tuple(place.get(title, -1) for title in titles)
            problems.append(SearchProblem(*problem_of(row, where)[:2], support, titles))
        if lost := sum(problem.support.count(-1) for problem in problems):
            warnings.warn(f"{path}: {lost} supporting titles are not in the corpus; those questions are never complete")
        return problems

    def reset(self, rng: Random) -> None:
        if self.problems:
            self.problem, self.index = rng.choice(self.problems), self.corpus
        else:
            self.problem, self.index = generate_search_problem(rng, self.split)
        self.turn, self.history, self.said, self.answer = 0, [], "", None       # history: (query, passages found)
        self.queue = [self.agents[0]]

    def found(self) -> int:
        """How many of the needed passages are found; where a file does not name them, 1 if one that is found holds the answer."""
        seen = {i for _, hits in self.history for i in hits}
        if self.problem.support:
            return len(seen.intersection(self.problem.support))
        texts = [normal_text(self.index.passages[i].text) for i in seen]
        return int(any(f" {normal_text(a)} " in f" {text} " for a in self.problem.answers for text in texts))

    def complete(self) -> bool:
        return self.found() == max(1, len(set(self.problem.support)))

    def observe(self, agent: str) -> str:
        question, passages = self.problem.question, self.index.passages
        if self.terse:      # the best passage last
            return f"{agent}: {question}" + "".join(" found" + "".join(f" {passages[i].text}" for i in hits[::-1])
                                                    for _, hits in self.history)
        seen = "".join(f"\n\nStep {n}: <search>{shorten(query) or 'no query'}</search>\n<information>" + "\n".join(
            f"Doc {d} ({passages[i].title}): {shorten(passages[i].text, 2000)}" for d, i in enumerate(hits, 1)) + "</information>"
            for n, (query, hits) in enumerate(self.history, 1))
        task = f"Question: {question}{seen}\n\nThis is step {self.turn + 1} of at most {self.turns}. "
        if agent == "verifier":
            return task + ("Judge whether the information found so far is enough to answer. End with your verdict, "
                           "<verify>yes</verify> or <verify>no</verify>.")
        if agent == "search":
            return f"{task}More information is needed: {shorten(self.said)}\n\nThink, then give one query in <search></search>."
        search = "Either give one search query in <search></search>, or answer: think, then " * self.single_agent
        return f"{task}{search or 'Think, then '}give the short answer alone in <answer></answer>."

    def step(self, agent: str, action: str) -> Reward:
        self.take_turn(agent)
        last = self.turn == self.turns - 1
        if agent == "verifier":
            verdict = verdict_in(action, "yes", "no")
            self.said, enough = action, verdict != "no"
            self.queue = ["answer"] if enough else [] if last else ["search"]
            self.turn += not self.queue
            return Reward(local=float(verdict is not None and enough == self.complete()), valid=verdict is not None)

        self.turn += 1
        self.answer = last_tag(action, "answer") if agent == "answer" else None
        query = last_tag(action, "search") if agent == "search" or self.single_agent and not self.answer else None
        before = self.found()
        if query:
            self.history.append((query, self.index.search(query)))
        if not self.answer and not last:
            self.queue = [self.agents[0]]
        return Reward(float(self.success()), float(self.found() > before), bool(self.answer or query))

    def success(self) -> bool:
        return self.answer is not None and normal_text(self.answer) in map(normal_text, self.problem.answers)

    def solve(self, agent: str) -> str:
        if agent == "verifier":
            return f"<verify>{'yes' if self.complete() or self.turn == self.turns - 1 else 'no'}</verify>"
        if agent == "search" or self.single_agent and not self.complete() and self.turn < self.turns - 1:
            asked = {query for query, _ in self.history}
            return f"<search>{next((q for q in self.problem.queries if q not in asked), self.problem.question)}</search>"
        guess = "".join(self.index.passages[hits[0]].text for _, hits in self.history[-1:] if hits).rstrip(".").split()[-1:]
        return f"<answer>{self.problem.answers[0] if self.complete() else ''.join(guess) or 'unknown'}</answer>"

    def slip(self, agent: str, rng: Random) -> str:
        if agent == "verifier" and self.history and rng.random() < SLIP:
            return "<verify>yes</verify>"
        return self.solve(agent)

    def random_action(self, agent: str, rng: Random) -> str:
        if agent == "verifier":
            return f"<verify>{rng.choice(('yes', 'no'))}</verify>"
        word = rng.choice(rng.choice(self.index.passages).text.rstrip(".").split() or ["nothing"])
        return f"<{agent}>{word}</{agent}>"


# -- 9. The table of tasks --------------------------------------------------------------------------------------------

def math_team(reasoners: int = 0, tools: int = 0, **settings) -> Env:
    """The pair of a reasoner and a tool agent; with numbers of them an ensemble, whose judge has the last word."""
    return Ensemble(reasoners, tools, **settings) if reasoners or tools else Math(**settings)


TASKS: dict[str, Callable[..., Env]] = {"math": math_team, "math-verify": MathVerify, "plan-path": PlanPath,
                                        "sokoban": Sokoban, "sudoku": Sudoku, "code": Code, "search": Search}
