"""The sandbox: each program ends, leaves nothing behind, and says in one line what went wrong.

`wall` runs a test behind each wall that works here, and behind none. Where the kernel alone has to hold, `kernel` leaves
out the hook inside Python, so that the wall itself is tested.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import envs
import pytest
from envs import NOBODY, WALLS, Outcome, run_behind, run_program, run_programs, works


MODES = {name: wall for name, wall in {**WALLS, "nobody": NOBODY, **{f"nobody, {name}": NOBODY + WALLS[name] for name in ("bwrap", "unshare")}}.items()
         if name == "plain" or (os.geteuid() == 0 or "nobody" not in name) and works(wall)}
LINUX = os.path.exists("/proc/self/environ") and hasattr(os, "pidfd_open")


@pytest.fixture(params=MODES)
def wall(request):
    return MODES[request.param]


@pytest.fixture(params=[*MODES, *(f"{name} kernel only" for name in MODES if name != "plain")])
def kernel(request, monkeypatch):
    """Each mode, and once more without the hook for those that have something better."""
    name, only, _ = request.param.partition(" kernel only")
    if only:
        monkeypatch.setattr(envs, "RUNNER", envs.RUNNER.replace(envs.GUARD, ""))
    return MODES[name]


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """A folder for temporary folders that is open to all."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())
    folder.rmdir()


def processes(mark):
    """The processes that have this text in their command line."""
    ps = subprocess.run(["ps", "-eww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in ps.splitlines() if mark in line and not line.startswith("ps ")]


def soon(condition):
    """A killed process takes a moment to go."""
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


# -- what a program can do --------------------------------------------------------------------------------------------


def test_a_program_prints_and_reads(wall):
    assert run_behind(wall, "print(47 + 38)") == (True, True, "85\n", "")
    assert run_behind(wall, "print(int(input()) * 2)", "21\n").stdout == "42\n"
    assert run_behind(wall, "print(57)\nexit()") == (True, True, "57\n", "")
    assert run_behind(wall, "exit(0)\nprint(57)") == run_behind(wall, "import os; os._exit(0)") == (True, True, "", "")
    assert run_behind(wall, "try: 1/0\nexcept ZeroDivisionError as e: print(e)") == (True, True, "division by zero\n", "")
    assert run_behind(wall, "import sys; sys.stdout.buffer.write(b'\\xff\\x00a')").stdout == "\ufffd\x00a"
    assert run_behind(wall, "import pickle\nclass A: pass\npickle.dumps(A())\nprint(__name__)").stdout == "__main__\n"
    assert run_behind(wall, "open('a', 'w').write('b'); print(open('a').read())").stdout == "b\n"
    assert run_behind(wall, "import tempfile as t\nwith t.TemporaryDirectory() as d: open(d + '/a', 'w')\nprint(1)").stdout == "1\n"
    assert run_behind(wall, "import asyncio; asyncio.run(asyncio.sleep(0.01)); print(1)").stdout == "1\n"
    assert "NameError" in run_behind(wall, "print(sys)").error
    assert run_behind(wall, "import sys; print(sys.argv, sys.orig_argv)").stdout == "['program.py'] []\n"     # its own text is not to be read


def test_much_input_is_read_or_left(wall):
    assert run_behind(wall, "print(1)", "x" * 10**6) == (True, True, "1\n", "")
    assert run_behind(wall, "print(len(input()))", "x" * 10**7).stdout == "10000000\n"


@pytest.mark.parametrize("program, built, error", [
    ("def", False, "SyntaxError"), ("1/0", True, "ZeroDivisionError"), ("x = [0] * 10**10", True, "MemoryError"),
    ("input()", True, "EOFError"), ("while True: print('a' * 999)", True, "too large"),
    ("import numpy", True, "ModuleNotFoundError"), ("raise SystemExit(3)", True, "exit status 3"),
    ("def f(): f()\nf()", True, "RecursionError"), ("import os; os._exit(1)", True, "exit status 1"),
    ("import os; os.abort()", True, "killed by signal 6"), ("raise ValueError('a\\nb')", True, "b"),
    ("(" * 9000, False, "Error")])
def test_programs_that_fail(wall, program, built, error):
    outcome = run_behind(wall, program)
    assert outcome.built == built and not outcome.ok and error in outcome.error and "\n" not in outcome.error
    assert len(outcome.stdout) <= envs.OUTPUT


@pytest.mark.parametrize("program, error", [
    ("print('\0')", "NUL"), ("print('\ud800')", "unicode"), ("#" * 100_001, "more than 100000"), (("print(1)", "\0"), "NUL")])
def test_texts_that_are_no_program(program, error):
    outcome = run_program(program)
    assert outcome == Outcome(False, False, "", outcome.error) and error in outcome.error


# -- time -------------------------------------------------------------------------------------------------------------


def together(wall, *programs):
    """All at once, without `run_program`'s limit on how many run."""
    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(lambda program: run_behind(wall, program), programs))


def test_programs_that_never_end(wall, monkeypatch):
    """One computes, and is out of its 2 s of CPU time; one sleeps, and ends with the far limit on all time, here 4 s."""
    monkeypatch.setattr(envs, "WALL_SECONDS", 4)
    start = time.monotonic()
    loop, sleeper, nap = together(wall, "print(1, flush=True)\nwhile True: pass", "import time; print(1, flush=True); time.sleep(1000)",
                                  "import time; time.sleep(1); print(1)")
    assert loop == sleeper == (True, False, "1\n", "out of time") and nap == (True, True, "1\n", "")
    assert 4 < time.monotonic() - start < 7


def test_a_busy_machine_changes_no_outcome(wall):
    """Four programs a core: each takes over 2 s of wall time for 0.6 s of CPU time, which is no sleep."""
    programs = ["import time\nwhile time.process_time() < 0.6: pass\nprint(1)"] * 4 * os.cpu_count()
    assert together(wall, *programs) == [(True, True, "1\n", "")] * len(programs)


def test_programs_run_side_by_side_in_order_and_never_more_than_cores(monkeypatch):
    running, most, lock, real = 0, 0, threading.Lock(), envs.run_behind

    def counted(*args):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return real(*args)
        finally:
            with lock:
                running -= 1
    envs.walls()
    monkeypatch.setattr(envs, "run_behind", counted)
    jobs = [("import time; time.sleep(0.1); print(int(input()) + 1)", str(i)) for i in range(4 * os.cpu_count())]
    found = []
    nested = threading.Thread(target=lambda: found.extend(run_programs(jobs)))
    nested.start()
    assert [int(outcome.stdout) for outcome in run_programs(jobs)] == list(range(1, len(jobs) + 1))
    nested.join()
    assert [outcome.ok for outcome in found] == [True] * len(jobs) and most == os.cpu_count()
    assert run_programs([]) == []


def test_equal_programs_with_equal_input_run_once(monkeypatch):
    """The candidates of a group are often equal, and then they have to earn the same: drawing lots again gains nothing."""
    program = "import random; print(random.random(), *open(0))"
    envs.walls()
    ran, real = [], envs.run_behind
    monkeypatch.setattr(envs, "run_behind", lambda *args: ran.append(args) or real(*args))
    first, *again, other = run_programs([(program, "a")] * 5 + [(program, "b")])
    assert again == [first] * 4 and first.ok and other.stdout[:9] != first.stdout[:9] and len(ran) == 2


def test_texts_that_run_one_after_the_other_share_their_names_and_see_no_later_text(wall):
    assert run_behind(wall, ("x = 1", "x += 1", "print(x)")).stdout == "2\n"
    assert run_behind(wall, ("print(1)", "1 +", "print(2)")) == (False, False, "", "SyntaxError: invalid syntax (program.py, line 1)")
    spy = "import sys; print([c for c in sys._getframe().f_code.co_consts if isinstance(c, str)], [k for k in globals() if 'code' in k])"
    assert "secret" not in run_behind(wall, (spy, "'secret' and print('reached')")).stdout


@pytest.mark.skipif(not LINUX, reason="ps of Linux")
def test_a_program_ends_by_itself_when_the_trainer_is_killed(wall, tmp_path, monkeypatch):
    """Its own clock, here of 3 s, needs nobody who watches."""
    monkeypatch.setattr(envs, "RUNNER", envs.RUNNER.replace(f"alarm({envs.WALL_SECONDS + 2})", "alarm(3)"))
    mark = f"mark{os.getpid()}"
    thread = threading.Thread(target=lambda: run_behind(wall, f"import time; '{mark}'; time.sleep(1000)"))
    with monkeypatch.context() as patch:
        patch.setattr(envs, "WALL_SECONDS", 1000)
        thread.start()
        assert soon(lambda: processes(mark))
        thread.join(6)
    assert not thread.is_alive() and not processes(mark)


# -- what it cannot reach ---------------------------------------------------------------------------------------------


def test_an_empty_environment_and_an_empty_folder(wall, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    seen = run_behind(wall, "import os; print(dict(os.environ), os.listdir(), os.getcwd())").stdout
    assert "hunter2" not in seen and "[]" in seen and os.getcwd() not in seen


@pytest.mark.skipif(not LINUX, reason="no /proc to search")
def test_no_process_tells_its_environment(kernel):
    """Not the parent's, and none that a search of all of /proc finds."""
    program = ("import os\nfor who in [os.getppid(), *os.listdir('/proc')]:\n"
               "    try: print('hunter2' in open(f'/proc/{who}/environ').read())\n    except OSError as e: pass\nprint('end')")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"SECRET_TOKEN": "hunter2"}) as trainer:
        try:
            seen = run_behind(kernel, program).stdout
        finally:
            trainer.communicate(b"\n")
    assert "True" not in seen and seen.endswith("end\n")


def test_no_connection(kernel, request):
    if "[nobody kernel only]" in request.node.name:
        pytest.skip("another user has the same network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1); print('connected')"
        outcome = run_behind(kernel, program)
    assert not outcome.ok and outcome.stdout == "" and "Error" in outcome.error


def test_no_signal_reaches_another_process(kernel):
    """Not the parent, not everybody (-1), not a bystander. SIGCONT does no harm to those who do not listen."""
    listen = "import signal; signal.signal(signal.SIGCONT, lambda *_: print('hit', flush=True)); print('ready', flush=True); input()"
    hits, before = [], signal.signal(signal.SIGCONT, lambda *_: hits.append(1))
    with subprocess.Popen([sys.executable, "-c", listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bystander:
        try:
            assert bystander.stdout.readline() == "ready\n"
            outcome = run_behind(kernel, f"import os, signal\nfor who in (os.getppid(), -1, {bystander.pid}):\n"
                                 "    try: os.kill(who, signal.SIGCONT)\n    except OSError: pass\nprint('end')")
        finally:
            heard = bystander.communicate("\n")[0]
            signal.signal(signal.SIGCONT, before)
    assert outcome.stdout == "end\n" and heard == "" and not hits


def test_it_writes_to_its_own_folder_only(wall, temp):
    """One file beside its folder, one that is there, one behind a link, and a folder to delete."""
    beside, there = temp / "beside", temp / "there"
    there.mkdir()
    (there / "file").write_text("mine")
    for mode in (there, there / "file"):
        mode.chmod(0o777)
    for program in (f"open({str(beside)!r}, 'w')", f"open({str(there / 'file')!r}, 'a').write('yours')",
                    f"import os; os.remove({str(there / 'file')!r})", f"import shutil; shutil.rmtree({str(there)!r})",
                    f"import os; os.symlink({str(there)!r}, 'link'); open('link/file', 'w')",
                    f"import os; os.link({str(there / 'file')!r}, 'a')", "import os; os.rmdir(os.getcwd())",
                    f"import os; os.open({str(beside)!r}, os.O_CREAT)"):
        outcome = run_behind(wall, program)
        assert not outcome.ok and "Error" in outcome.error
    assert not beside.exists() and (there / "file").read_text() == "mine" and (there / "file").stat().st_nlink == 1
    (there / "file").unlink()
    there.rmdir()


# -- what it leaves behind --------------------------------------------------------------------------------------------

CHILD = "os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, '-c', 'import time; time.sleep(30)', {mark!r}])"


@pytest.mark.parametrize("program", [
    f"import os, sys\n{CHILD}", f"import os, sys\nos.fork() or os.setsid()\n{CHILD}",
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)', {mark!r}], start_new_session=True)",
    "import os\nwhile True: os.fork()"])
def test_no_child_outlives_its_program(wall, program):
    mark = f"mark-{time.time_ns()}"
    outcome = run_behind(wall, "print('started', flush=True)\n" + program.format(mark=mark))
    assert outcome.stdout.startswith("started\n") and not outcome.ok and "Error" in outcome.error
    assert not processes(mark)


@pytest.mark.parametrize("mode", [name for name in MODES if "bwrap" in name or "unshare" in name])
def test_a_namespace_ends_with_all_its_processes(mode, monkeypatch):
    """Even if a child comes to be, without the hook and for root, and leaves its session and its parent."""
    monkeypatch.setattr(envs, "RUNNER", envs.RUNNER.replace(envs.GUARD, ""))
    mark = f"mark-{time.time_ns()}"
    outcome = run_behind(MODES[mode], "import os, sys, time\nprint('started', flush=True)\nif os.fork() == 0:\n    os.setsid()\n"
                         f"    {CHILD.format(mark=mark)}\ntime.sleep(0.3)")
    assert outcome.stdout == "started\n" and soon(lambda: not processes(mark))


def test_folders_are_cleared_away_and_links_are_not_followed(wall, temp, tmp_path):
    (tmp_path / "file").write_text("mine")
    for program in ("for i in range(1200): os.mkdir('a'); os.chdir('a')",
                    "os.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0o500); os.chmod('a', 0)",
                    f"os.symlink({str(tmp_path)!r}, 'link'); os.symlink({str(tmp_path / 'file')!r}, 'file')"):
        assert run_behind(wall, "import os\n" + program) == (True, True, "", "")
        assert not list(temp.iterdir())
    (tmp_path / "file").chmod(0o444)
    (temp / "link").symlink_to(tmp_path)
    envs.clear(str(temp / "link"))
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "file").stat().st_mode & 0o777 == 0o444


def test_two_hundred_programs_leave_nothing(temp, monkeypatch):
    """No process, no zombie, no folder, no open file and no memory of the parent."""
    monkeypatch.setattr(envs, "WALL_SECONDS", 4)

    def state():
        files = len(os.listdir("/proc/self/fd")) if LINUX else 0
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 if LINUX else 0
        return files, threading.active_count(), memory
    quick = ["print(1)", "1/0", "def", "exit(0)", "import os; os._exit(3)", "x = [0] * 10**10", "print('a' * 10**7)", "import os; os.fork()",
             "import os; os.mkdir('a'); os.symlink('/', 'a/b')", "def f(): f()\nf()", "import socket; socket.create_connection(('127.0.0.1', 9))"]
    slow = ["while True: pass", "import time; time.sleep(1000)"]
    run_programs([(program, "") for program in quick * 2])
    files, threads, memory = state()
    outcomes = run_programs([(program, "x" * 1000 + str(i)) for i, program in enumerate(slow * 2 + quick * 18)])
    assert len(outcomes) > 200 and sum(outcome.ok for outcome in outcomes) == 3 * 18
    assert all(bool(outcome.error) != outcome.ok for outcome in outcomes)
    assert soon(lambda: threading.active_count() == threads)       # a timer that was stopped takes a moment to go
    after = state()
    assert after[:2] == (files, threads) and after[2] - memory < 4 << 20
    assert not processes(str(temp))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
