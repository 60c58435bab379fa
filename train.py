"""Train a team of LLM agents, or look at a trained one.

    python train.py --task math                                  # the tiny model: any machine, offline, some minutes
    python train.py --task math --model Qwen/Qwen3-1.7B --data train.jsonl --eval-data test.jsonl
    python train.py --evaluate runs/math-at-grpo-seed0 --show 3   # score a finished run, print three plays
    python train.py --task sokoban --evaluate expert              # play without a model: expert, or random
    torchrun --nproc-per-node 4 train.py --task math ...          # on four GPUs; each plays a quarter of --envs

A run leaves runs/<name>/: config.json, metrics.jsonl (an object a step), transcripts.jsonl, curves.png, checkpoints/.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

from envs import LEVELS, TASKS, held_out, load_corpus, play

# The names of algorithms.METHODS, read without importing torch: a slip in a flag is answered at once.
METHOD_NAMES = re.findall(r'^    "([\w-]+)": +Method\(', Path(__file__).with_name("algorithms.py").read_text(), re.M)


# ---------------------------------------------------------------------------------------------------------------------
# 1. The command line. All flags, files and folders are checked before torch is imported.
# ---------------------------------------------------------------------------------------------------------------------


RANK, LOCAL_RANK, PROCESSES = (int(os.environ.get(name) or default) for name, default in
                               (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))      # set by torchrun


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"train.py: {message}\n" if LOCAL_RANK == 0 else None)      # the processes of a machine have one input


def number(kind: type, least: float, most: float = float("inf")):
    """An argparse type: a number from least to most."""
    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most or value == float("inf"):
            limits = f"from {least:g} to {most:g}" if most < 10**9 else f"of at least {least:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number {limits}")
        return value
    return parse


def by_role(kind: Callable[[str], object]) -> Callable[[str], object]:
    """An argparse type: a value, or role=value,... as a dict."""
    def parse(text: str):
        if not re.match(r"\w+=", text):
            return kind(text)
        pairs = [pair.partition("=")[::2] for pair in text.split(",")]
        if len(dict(pairs)) < len(pairs):
            raise argparse.ArgumentTypeError(f"{text!r} names a role twice")
        return {role: kind(value) for role, value in pairs}
    return parse


def make_parser() -> Parser:
    parser = Parser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    positive, count, share = number(int, 1, 10**9), number(int, 0, 10**9), number(float, 0)

    add = parser.add_argument_group("task").add_argument
    add("--task", choices=TASKS, default="math", help="which team works on what (math)")
    add("--single-agent", action="store_true", help="only the agent that answers (math, code: one turn): both papers' baseline")
    add("--turns", type=positive, metavar="T", help="most turns, or rounds, of a play (4; math-verify and most of tiny: 2)")
    add("--level", type=int, choices=LEVELS, help="of generated problems; math: 1 small sums ... 5 four steps; code: steps (2)")
    add("--size", type=number(int, 3, 26), metavar="N", help="rows and columns: plan-path (10), sokoban (6), sudoku 4 or 9 (4)")
    add("--boxes", type=number(int, 1, 3), help="of sokoban (1)")
    add("--reasoners", type=number(int, 1, 99), metavar="N", help="math: an ensemble of so many reasoners ...")
    add("--tools", type=number(int, 1, 99), metavar="M", help="... and so many tool agents, with a judge")
    add("--data", metavar="FILE", type=os.path.abspath, help="problems to train on, .jsonl or .json (else generated)")
    add("--corpus", metavar="FILE", type=os.path.abspath, help="search: the passages of --data, rows with title and text")
    add("--eval-data", metavar="FILE", nargs="+", type=os.path.abspath,
        help="problems to evaluate on (else one in five of --data is kept)")

    add = parser.add_argument_group("model").add_argument
    add("--model", type=by_role(str), default="tiny",
        help="hub id or folder of a causal language model, or role=model,... (tiny: made on first use)")
    add("--sharing", default="per-role", help="LoRA adapters: per-role, shared, or any map role=name,... (per-role)")
    add("--rank", type=number(int, 1, 4096), default=16, help="LoRA rank; LoRA's own alpha is twice that (16)")
    add("--max-new-tokens", type=by_role(positive), metavar="N",
        help="most tokens of a completion, or role=N,... (1024; tiny: as its task needs)")
    add("--temperature", type=by_role(number(float, 0.01)), default=1.0, help="of sampling in training, or role=value,... (1.0)")
    add("--device", "--devices", type=by_role(str),
        help="cuda, cuda:1, mps or cpu, or role=device,...: a base for each (the first that is there)")
    add("--threads", type=number(int, 1, 1024), help="CPU threads (as torch chooses; tiny: 1)")
    add("--batch-tokens", type=positive, default=4096, metavar="N",
        help="most tokens in one forward and backward pass; lower it if memory runs out (4096)")

    add = parser.add_argument_group("method").add_argument
    add("--method", choices=METHOD_NAMES, default="at-grpo", help="a row of the table in algorithms.py (at-grpo)")
    add("--envs", type=positive, default=16, metavar="E", help="problems per step (16)")
    add("--branches", type=number(int, 2, 10**9), metavar="K", help="candidates per call of a tree (4), else plays per problem (8)")
    add("--alpha", type=share, default=1.0, help="weight of the team reward in step credit, AT-GRPO Eq. 3 (1.0)")
    add("--invalid-penalty", type=share, metavar="C",
        help="what a text that cannot be parsed costs in outcome credit (0.1; search 0.01)")

    add = parser.add_argument_group("update").add_argument
    add("--steps", type=count, help="training steps (200; tiny: 20)")
    add("--lr", type=by_role(share), help="learning rate of AdamW, or role=value,... (1e-5; tiny: 1e-3)")
    add("--epochs", type=positive, default=1, help="optimizer steps per batch (1: exactly on-policy)")
    add("--clip", type=number(float, 0, 1), default=0.2, help="the ratio is clipped to 1 - clip ... 1 + clip (0.2)")
    add("--kl", type=share, default=0.0, help="weight in the loss of the KL divergence to the base (0)")
    add("--gradient-checkpointing", action="store_true", help="less memory, more time: compute activations twice")
    add("--loss-mean", choices=("token", "sequence"), default="token", help="mean over tokens, or over samples (token)")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval-every", type=positive, metavar="STEPS", help="also before the first step and after the last (20; tiny: 10)")
    add("--eval-n", type=count, default=200, metavar="N", help="evaluate on N problems (of each file); 0: never (200)")
    add("--eval-k", type=positive, default=1, metavar="K", help="plays per problem: greedy if 1, else avg@K, pass@K (1)")
    add("--evaluate", metavar="RUN", help="do not train: score the newest checkpoint of this folder; expert, random: play "
        "--task without a model")
    add("--show", type=count, default=0, metavar="N", help="with --evaluate: print N plays (of a run, one group of a tree too)")

    add = parser.add_argument_group("run").add_argument
    add("--seed", type=count, default=0, help="of problems, adapters and sampling (0)")
    add("--out", metavar="DIR", help="the run's folder (runs/<task>-<method>-seed<seed>)")
    return parser


SETTINGS = ("turns", "level", "size", "boxes", "reasoners", "tools")       # what a task may take, and not every task does
BASELINES = ("expert", "random")
FREE_IN_EVALUATION = {"evaluate", "show", "eval_n", "eval_k", "eval_data", "device", "threads", "batch_tokens",
                      "gradient_checkpointing"}


def parse(argv: list[str]) -> argparse.Namespace:
    """Read and check everything that the user gave. Ends with one line and status 2 where something cannot work."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.evaluate is not None and args.evaluate not in BASELINES:
            parser.set_defaults(**dict.fromkeys(vars(args)))        # what is not None now was typed
            read_config(args, {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None})
        elif args.show and not args.evaluate:
            raise ValueError("--show prints plays of a finished run, of the expert or at random; give --evaluate too")
        elif args.evaluate and not args.eval_n:
            raise ValueError(f"--evaluate {args.evaluate} --eval-n 0 evaluates nothing; give --eval-n N")
        baseline, tiny = args.evaluate in BASELINES, plays_tiny(args)
        if tiny and (args.data or args.eval_data):
            raise ValueError("--data and --eval-data need a real model, given with --model: the tiny one knows only the "
                             "words of generated problems")
        if args.eval_data and not args.eval_n:
            raise ValueError("--eval-data is given, but --eval-n 0 evaluates nothing; leave one of them out")
        if args.corpus and args.task != "search":
            raise ValueError(f"--corpus is for --task search, not for {args.task}")
        if args.corpus and not (args.data or args.eval_data):
            raise ValueError("--corpus holds the passages of --data or --eval-data; give one of them too")
        args.passages = load_corpus(args.corpus) if args.corpus else None
        env = make_env(args, "train")
        defaults = {"steps": 20, "lr": 1e-3, "eval_every": 10} | env.tiny if tiny else {"steps": 200, "lr": 1e-5, "eval_every": 20}
        for name, value in ({"invalid_penalty": env.penalty} | defaults).items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        env = make_env(args, "train")
        for name in SETTINGS:           # for config.json: what the task chose by itself
            setattr(args, name, getattr(env, name, getattr(args, name)))
        check_sharing(args.sharing, env.agents)
        check_roles(args, env.agents, defaults)
        check_devices(args)
        args.problems = read_problems(args)
        if not tiny and not baseline:
            models = args.model
            args.model = {r: check_model(m) for r, m in models.items()} if isinstance(models, dict) else check_model(models)
        if args.evaluate is None and RANK == 0:
            args.out = make_folder(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def plays_tiny(args: argparse.Namespace) -> bool:
    return args.model == "tiny" and args.evaluate not in BASELINES


def make_env(args: argparse.Namespace, split: str, problems: list | None = None):
    """An env of the task, with the settings that were given. Raises ValueError for one that the task does not have."""
    settings = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    settings |= {"problems": problems} if problems else {}
    settings |= {"corpus": args.passages} if args.passages else {}
    try:
        return TASKS[args.task](**settings, single_agent=args.single_agent, terse=plays_tiny(args), split=split)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if not unknown:
            raise
        raise ValueError(f"--{unknown[1].replace('problems', 'data')} is no setting of --task {args.task}") from None


def read_config(args: argparse.Namespace, given: dict) -> None:
    """Fill args from the run's config.json. Raises ValueError if there is none, or if a flag contradicts it."""
    run = Path(args.evaluate)
    if not run.is_dir():
        runs = ", ".join(str(config.parent) for config in sorted(run.parent.glob("*/config.json"))[:9])
        raise ValueError(f"--evaluate {run}: no such folder; allowed are expert, random, and runs that are there: {runs or 'none'}")
    try:
        config = dict(json.loads((run / "config.json").read_text()))
    except (OSError, ValueError, TypeError):
        raise ValueError(f"--evaluate {run}: its config.json is missing or damaged; is this the folder of a run?") from None
    if config.get("task", "math") not in TASKS or config.get("method", "grpo") not in METHOD_NAMES:
        raise ValueError(f"--evaluate {run}: its config.json names a task or a method that is not there")
    if isinstance(given.get("model"), str) and Path(given["model"]).is_dir():
        given["model"] = check_model(given["model"])
    for name, value in config.items():
        if name in given and name not in FREE_IN_EVALUATION and given[name] != value:
            flag = f"--{name.replace('_', '-')} {given[name]}"
            raise ValueError(f"{flag} contradicts the run, which has {value}; leave the flag out")
        if name not in given:
            setattr(args, name, value)
    if not args.eval_n:
        raise ValueError(f"--evaluate {run}: the run was made without evaluation; give --eval-n N")
    if config.get("data") and not config.get("eval_n") and not args.eval_data:
        raise ValueError(f"--evaluate {run}: the run has trained on all of its --data; give --eval-data FILE")
    if not newest_checkpoint(run):
        raise ValueError(f"--evaluate {run}: no checkpoint in it; the run ended before the first was saved")


def newest_checkpoint(run: str | Path) -> Path | None:
    return max((file.parent for file in Path(run).glob("checkpoints/step-??????/step.json")), default=None)


def check_sharing(sharing: str, agents: tuple[str, ...]) -> None:
    """Raise ValueError unless sharing is a word or a map of exactly the roles."""
    if sharing in ("shared", "per-role"):
        return
    roles = set(roles_of(agents))
    pairs = [pair.partition("=")[::2] for pair in sharing.split(",")]
    good = all(re.fullmatch(r"[A-Za-z][\w-]*", name) for _, name in pairs)
    if sorted(role for role, _ in pairs) != sorted(roles) or not good:
        example = ",".join(f"{role}=team" for role in sorted(roles))
        raise ValueError(f"--sharing {sharing}: allowed are shared, per-role, or a name (a letter, then letters, digits, "
                         f"- and _) for every role, like {example}")


def roles_of(agents: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(agent.rstrip("0123456789") for agent in agents))


def check_roles(args: argparse.Namespace, agents: tuple[str, ...], defaults: dict) -> None:
    """Complete the flags that were given as role=value,...; ValueError for unknown roles and for two values on one adapter."""
    roles = roles_of(agents)
    adapters = {r: r for r in roles} if args.sharing == "per-role" else dict.fromkeys(roles, "shared")
    if "=" in args.sharing:
        adapters = dict(pair.split("=") for pair in args.sharing.split(","))
    for name in ("model", "device", "lr", "temperature", "max_new_tokens"):
        values, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if not isinstance(values, dict):
            continue
        if not set(values) <= set(roles) or name in ("model", "device") and len(values) < len(roles):
            needed = "needed is one for each of" if name in ("model", "device") else "allowed are"
            raise ValueError(f"{flag} names {', '.join(values)}; {needed} {', '.join(roles)}")
        default = {"temperature": 1.0, "max_new_tokens": None} | defaults
        values = {r: values[r] if r in values else default[name] for r in roles}
        setattr(args, name, values)
        for r in roles:
            other = next(o for o in roles if adapters[o] == adapters[r])
            if values[other] != values[r]:
                raise ValueError(f"{flag}: {other} and {r} share an adapter, so they need the same value; see --sharing")


def check_devices(args: argparse.Namespace) -> None:
    """Raise ValueError for a device that does not exist, and for one that several processes would have to share."""
    devices = list(args.device.values()) if isinstance(args.device, dict) else [args.device] * bool(args.device)
    for device in devices:
        if not re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", device):
            raise ValueError(f"--device {device}: allowed are cpu, mps, cuda and cuda:N")
    if PROCESSES > 1 and (isinstance(args.device, dict) or args.device not in (None, "cpu", "cuda")):
        raise ValueError(f"--device with {PROCESSES} processes: allowed are cuda, where each takes a GPU, and cpu")
    if PROCESSES > 1 and args.evaluate is None and args.envs % PROCESSES:
        raise ValueError(f"--envs {args.envs} cannot be divided among {PROCESSES} processes; give a multiple of {PROCESSES}")


def read_problems(args: argparse.Namespace) -> dict:
    """{"train": problems or None for generated ones, "eval": {file name: problems}}. No problem is in both."""
    load = make_env(args, "train").load
    train = load(args.data) if args.data else None
    if args.evaluate in BASELINES and args.data and not args.eval_data:     # nothing is trained: play them all
        return {"train": train, "eval": {Path(args.data).stem: train}}
    evals = {Path(f).stem: load(f) for f in args.eval_data or []}
    if len(evals) < len(args.eval_data or []):
        raise ValueError("--eval-data: two files have the same name; rename one, as their results are logged by name")
    if args.data and args.eval_n and not evals:
        evals = {Path(args.data).stem: [p for p in train if held_out(p.question)]}
    kept = {p.question for problems in evals.values() for p in problems}
    train = [p for p in train if p.question not in kept] if args.data else None
    if args.data and (not train or not all(evals.values())):
        raise ValueError(f"{args.data}: too few problems to train on some and evaluate on others; give --eval-data FILE, "
                         "or --eval-n 0")
    return {"train": train, "eval": evals}


def check_model(name: str) -> str:
    """A local folder or a hub id that can be had; returns it, with ~ expanded. Raises ValueError."""
    if name == "tiny":
        raise ValueError("--model: tiny is made for a whole team and cannot be one of several; give folders or hub ids")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists() or not list(path.glob("*.safetensors")):
            raise ValueError(f"--model {name}: the folder has no config.json with *.safetensors beside it; needed is a "
                             "model saved by transformers")
        return str(path.resolve())
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise ValueError(f'--model {name}: no such folder, and no hub id like Qwen/Qwen3-1.7B; "tiny" needs no download')
    from huggingface_hub import HfApi, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        try:
            HfApi().model_info(name, timeout=1.5)
        except Exception as error:      # not there, private, gated, no network, ...: the class says which
            raise ValueError(f"--model {name}: neither a folder nor downloaded before, and the hub does not give it "
                             f"({type(error).__name__}); check the name and the network, or give a folder") from None
    return name


def make_folder(args: argparse.Namespace) -> str:
    """Create the run's folder, never one that holds a run already. Raises ValueError if it cannot be written."""
    out = Path(args.out or f"runs/{args.task}{'-single' * args.single_agent}-{args.method}-seed{args.seed}")
    if args.out and (out / "metrics.jsonl").exists():
        raise ValueError(f"--out {out}: there is a run in it already; give another folder, or delete it")
    names = [out] + [out.with_name(f"{out.name}-{i}") for i in range(2, 1000)]
    out = next(name for name in names if not (name / "metrics.jsonl").exists())
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_config(out, args)
        (out / "config.json").unlink()      # it can be written; it stays there once the model is loaded
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror}); give a folder of yours") from None
    return str(out)


def write_config(out: Path, args: argparse.Namespace) -> None:
    config = {name: value for name, value in vars(args).items() if name not in ("problems", "passages", "evaluate", "show", "out")}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# 2. What is trained, and on what
# ---------------------------------------------------------------------------------------------------------------------


def reset_envs(args: argparse.Namespace, step: int) -> list:
    """The envs of one training step: all, or this process's share of them.

    Env t of step s depends on (seed, s, t) only, whatever was played before."""
    share = args.envs // PROCESSES
    envs = [make_env(args, "train", args.problems["train"]) for _ in range(share)]
    for t, env in enumerate(envs, RANK * share):
        env.reset(Random(f"{args.seed}/train/{step}/{t}"))
    return envs


def eval_sets(args: argparse.Namespace) -> dict[str, list]:
    """The same fresh problems at every evaluation: {"": envs} for generated ones, else {file: envs}, each problem once."""
    sets = {}
    for name, problems in (args.problems["eval"] or {"": None}).items():
        if problems is None:
            envs = [make_env(args, "eval") for _ in range(args.eval_n)]
        else:
            chosen = Random(f"{args.seed}/eval").sample(problems, min(args.eval_n, len(problems)))
            envs = [make_env(args, "eval", [problem]) for problem in chosen]
        for t, env in enumerate(envs):
            env.reset(Random(f"{args.seed}/eval/0/{t}"))
        sets[name] = envs
    return sets


def fail(message: str) -> None:
    sys.stderr.write(f"train.py: {f'process {RANK}: ' * (PROCESSES > 1)}{message}\n")
    sys.exit(2)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def build_policies(args: argparse.Namespace) -> dict:
    """Load or make the models, put the adapters on them, and say in a line each what there is."""
    import torch
    import transformers
    from mas_rl import distinct, load_policies, pick_device

    transformers.logging.disable_progress_bar()
    if args.threads or args.model == "tiny":
        torch.set_num_threads(args.threads or 1)
    device = args.device or pick_device()
    start, agents, what, where = time.perf_counter(), make_env(args, "train").agents, args.model, device
    try:
        if PROCESSES > 1:
            device = join_processes(device)
        bases, models = {}, {}          # a base for each pair of a model and a device
        for r in roles_of(agents):
            what, where = (value[r] if isinstance(value, dict) else value for value in (args.model, device))
            bases[what, where] = models[r] = bases.get((what, where)) or load_base(args, what, where)
        contexts = [getattr(model.config, "max_position_embeddings", None) or 2048 for model, _ in bases.values()]
        tokens, usual = args.max_new_tokens, min(1024, min(contexts) // 2)
        args.max_new_tokens = {r: n or usual for r, n in tokens.items()} if isinstance(tokens, dict) else tokens or usual
        policies = load_policies(models, agents, args.sharing, rank=args.rank, seed=args.seed, lr=args.lr,
                                 max_new_tokens=args.max_new_tokens, temperature=args.temperature,
                                 batch_tokens=args.batch_tokens, checkpointing=args.gradient_checkpointing)
    except Exception as error:      # a model's files can be wrong in any way; what matters is the first line of it
        fail(f"--model {what} on {where} cannot be set up: {first_line(error)}")
    if RANK == 0:
        for (name, _), (base, _) in bases.items():
            describe(args, name, [p for p in distinct(policies) if p.model.get_base_model() is base])
        if args.model == "tiny":
            print(f"  a small Llama that was taught this task by a teacher who makes mistakes; ready in "
                  f"{time.perf_counter() - start:.0f} s, kept in {base.config._name_or_path}\n"
                  "  for a real model: --model Qwen/Qwen3-1.7B, or any folder that transformers loads", flush=True)
    return policies


def describe(args: argparse.Namespace, name: str, policies: list) -> None:
    """One line for a base: its size, its adapters, where it is."""
    import torch

    model, threads, adapters = policies[0].model, torch.get_num_threads(), [policy.adapter for policy in policies]
    trained = sum(p.numel() for policy in policies for p in policy.parameters)
    print(f"model {name}: {sum(p.numel() for p in model.parameters()) - trained:,} parameters, frozen; {trained:,} train, in "
          f"{len(adapters)} LoRA adapter{'s' * (len(adapters) > 1)} of rank {args.rank} ({', '.join(adapters)}); device "
          f"{model.device}, {str(model.dtype)[6:]}, {threads} CPU thread{'s' * (threads > 1)}"
          f"{f', {PROCESSES} processes' * (PROCESSES > 1)}", flush=True)


def join_processes(device: str) -> str:
    """Meet the other processes that torchrun started; returns this one's device."""
    import torch

    if device == "cuda":
        device = f"cuda:{LOCAL_RANK}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device


def leave_processes() -> None:
    """End the work of several processes."""
    import torch

    time.sleep(0.1)     # torch 2.6: a gloo thread may still be freeing the last tensor, for which it needs Python's lock;
    torch.distributed.destroy_process_group()       # this call waits for that thread, and keeps the lock


def load_base(args: argparse.Namespace, name: str, device: str) -> tuple:
    """(model, tokenizer) on a device."""
    import torch
    from mas_rl import load_model, tiny_model

    torch.empty(0, device=device)
    if name != "tiny":
        return load_model(name, device)
    if PROCESSES > 1 and LOCAL_RANK:
        torch.distributed.barrier()         # one process of a machine makes it, the others wait
    model, tokenizer = tiny_model(lambda: make_env(args, "train"))      # one for all seeds: they change the learning
    if PROCESSES > 1 and not LOCAL_RANK:
        torch.distributed.barrier()
    return model.to(device), tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# 3. The loop
# ---------------------------------------------------------------------------------------------------------------------


def baseline(args: argparse.Namespace) -> None:
    """--evaluate expert, or random: play the evaluation problems without a model, in one process."""
    if RANK > 0:
        return

    def choose(env, agent: str) -> str:
        text = env.solve(agent) if args.evaluate == "expert" else env.random_action(agent, rng)
        calls.append((env.turn, agent, env.observe(agent), text))
        return text

    plays = []
    for i, env in enumerate(env for envs in eval_sets(args).values() for env in envs):
        rng, calls = Random(f"{args.seed}/{args.evaluate}/{i}"), []
        plays.append(play(env, choose))
        if i < args.show:
            show_play(i, env.success(), env.turn)
            for call, (_, reward) in zip(calls, plays[-1][0]):
                show_call(*call, reward)
    n = len(plays)
    lines = [f"{args.evaluate} on {n} problems of {args.task}: success {sum(env.success() for _, env in plays) / n:.3f}, "
             f"turns {sum(env.turn for _, env in plays) / n:.2f}"]
    for agent in dict.fromkeys(agent for rewards, _ in plays for agent, _ in rewards):
        own = [reward for rewards, _ in plays for who, reward in rewards if who == agent]
        team, local, invalid = (sum(values) / len(own) for values in zip(*((r.team, r.local, not r.valid) for r in own)))
        lines.append(f"  {agent}: {len(own) / n:.2f} calls a play, reward a call: team {team:.3f}, local {local:.3f}, "
                     f"unparsable {invalid:.3f}")
    print("\n".join(lines))


def train(args: argparse.Namespace) -> None:
    """make envs -> train_step -> log -> evaluate -> save"""
    import torch
    from tqdm import tqdm
    from algorithms import METHODS
    from mas_rl import gathered, train_step

    args.branches = args.branches or (4 if METHODS[args.method].sampler == "tree" else 8)
    policies, sets = build_policies(args), eval_sets(args)
    args.out = gathered([args.out])[0]          # of several processes the first writes everything
    run, log = Path(args.out), Log(args, policies)
    torch.manual_seed(args.seed + RANK)
    log.write(0, evaluate_all(args, policies, sets))
    log.save()
    bar = tqdm(range(1, args.steps + 1), unit="step", disable=not args.steps or RANK > 0)
    try:
        for step in bar:
            metrics, samples = train_step(reset_envs(args, step), policies, args.method, args.branches, args.alpha,
                                          args.invalid_penalty, epochs=args.epochs, clip=args.clip, kl_coef=args.kl,
                                          aggregate=args.loss_mean)
            last = step == args.steps
            evaluated = evaluate_all(args, policies, sets) if last or step % args.eval_every == 0 else {}
            log.transcript(step, samples)
            log.write(step, metrics | evaluated, bar)
            if evaluated or last:
                log.save()
    except (KeyboardInterrupt, RuntimeError) as error:      # what a device without memory raises is a RuntimeError
        if not isinstance(error, KeyboardInterrupt) and not re.search("out of memory|allocate memory", str(error)):
            raise
        bar.close()
        log.save()
        why = "stopped" if isinstance(error, KeyboardInterrupt) else out_of_memory(args, error)
        saved = newest_checkpoint(run)      # of several processes only the first could save
        sys.exit(f"{why} after step {log.rows[-1]['step']}; the adapters are saved in {saved}. python train.py --evaluate {run} scores them")
    first, final = log.rows[0].get("eval/success"), log.rows[-1].get("eval/success")
    if RANK == 0 and args.steps and final is not None:
        print(f"success on {sum(map(len, sets.values()))} unseen problems: {first:.3f} before, {final:.3f} after "
              f"{args.steps} steps and {log.minutes():.1f} minutes")
    if RANK == 0:
        print(f"everything is in {run}; next: python train.py --evaluate {run} --show 3")


def out_of_memory(args: argparse.Namespace, error: Exception) -> str:
    """What was asked for, and what to lower."""
    tokens = max(args.max_new_tokens.values()) if isinstance(args.max_new_tokens, dict) else args.max_new_tokens
    row = "" if args.batch_tokens > 2 * tokens else f", --max-new-tokens (now {tokens}), as one row alone is as long,"
    checkpointing = "" if args.gradient_checkpointing else " or add --gradient-checkpointing"
    return (f"train.py: out of memory ({first_line(error)}): --envs {args.envs} x --branches {args.branches}, up to {tokens} new "
            f"tokens, --batch-tokens {args.batch_tokens}; lower --batch-tokens{row}{checkpointing}; --envs and --branches only make "
            "more batches of the same size. Stopped")


def evaluate_all(args: argparse.Namespace, policies: dict, sets: dict[str, list]) -> dict[str, float]:
    """Evaluate on every set; several files are logged one by one as eval/<file>/..., and as their plain mean."""
    from mas_rl import evaluate

    if not args.eval_n:
        return {}
    results = {name: evaluate(envs, policies, args.eval_k, seed=args.seed) for name, envs in sets.items()}
    metrics = {key: sum(r[key] for r in results.values()) / len(results) for key in next(iter(results.values()))}
    if len(results) > 1:
        for name, result in results.items():
            metrics |= {key.replace("eval/", f"eval/{name}/", 1): value for key, value in result.items()}
    return metrics


def score(args: argparse.Namespace) -> None:
    """--evaluate: score the newest checkpoint of a finished run, and show plays."""
    from algorithms import METHODS
    from mas_rl import assign_advantages, credit, load_checkpoint, parallel_rollout, tree_rollout

    policies, sets = build_policies(args), eval_sets(args)
    checkpoint = newest_checkpoint(args.evaluate)
    try:
        step = load_checkpoint(checkpoint, policies)
    except Exception as error:      # files can be damaged in any way
        fail(f"--evaluate {args.evaluate}: {checkpoint} cannot be read ({first_line(error)})")
    metrics = evaluate_all(args, policies, sets)
    if RANK > 0:
        return
    numbers = ", ".join(f"{key} {value:.3f}" for key, value in metrics.items())
    print(f"{checkpoint}, step {step}, {sum(map(len, sets.values()))} problems: {numbers}")
    envs = [env for envs in sets.values() for env in envs][:args.show]
    if envs:
        samples, _ = parallel_rollout(envs, policies, 1, temperature=0.0)
        for e in range(len(envs)):
            calls = [s for s in samples if s.env == e]
            show_play(e, calls[0].outcome, calls[0].turns)
            for s in calls:
                show_call(s.turn, s.agent, s.prompt, s.completion.text, s)
        if METHODS[args.method].sampler == "tree":
            samples, _ = tree_rollout(envs, policies, args.branches, args.alpha)
            credit(samples, args.method, args.alpha, args.invalid_penalty)
            assign_advantages(samples, args.method)
            first = next((s for s in samples if s.advantage != 0), samples[0])      # a group with a signal, if there is one
            show_group([s for s in samples if (s.env, s.agent, s.node) == (first.env, first.agent, first.node)])


# ---------------------------------------------------------------------------------------------------------------------
# 4. What one can follow
# ---------------------------------------------------------------------------------------------------------------------


class Log:
    """Writes everything in the run's folder, keeps the bar and prints a line every few steps; in the first process only."""

    def __init__(self, args: argparse.Namespace, policies: dict):
        from mas_rl import blank_metrics

        self.run, self.rows, self.start = Path(args.out), [], time.perf_counter()
        self.policies, self.agents = policies, tuple(policies)
        self.lr = {f"lr/{r}": lr for r, lr in args.lr.items()} if isinstance(args.lr, dict) else {"lr": args.lr}
        self.every = max(1, args.steps // 10)
        self.blank = blank_metrics(args.method, policies)       # every key of a step, so that each line has the same
        self.totals = {"tokens_sampled": 0, "calls": 0}         # since the start: to compare methods at equal cost
        if RANK == 0:
            write_config(self.run, args)

    def minutes(self) -> float:
        return (time.perf_counter() - self.start) / 60

    def write(self, step: int, metrics: dict, bar=None) -> None:
        self.blank |= dict.fromkeys(key for key in metrics if key.startswith("eval/"))
        self.totals["tokens_sampled"] += metrics.get("tokens", 0)
        self.totals["calls"] += metrics.get("calls", 0)
        row = {"step": step} | self.blank | metrics | self.lr | self.totals
        for agent in self.agents:                               # AT-GRPO Fig. 6a: standardised over the run so far
            seen = [r[f"reward/{agent}"] for r in self.rows + [row] if r[f"reward/{agent}"] is not None]
            row[f"reward_std/{agent}"] = standardised(seen) if row[f"reward/{agent}"] is not None else None
        row.pop("tokens", None)
        row = {key: value if value is None or math.isfinite(value) else None for key, value in row.items()}    # JSON has no nan
        self.rows.append(row)
        if RANK > 0:
            return
        with open(self.run / "metrics.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")
        self.show(row, bar)

    def show(self, row: dict, bar) -> None:
        def of_agents(kind: str) -> dict[str, str]:
            return {a: f"{row[f'{kind}/{a}']:.2f}" for a in self.agents if row[f"{kind}/{a}"] is not None}

        success, rewards, silent = row.get("success", row.get("success_guided")), of_agents("reward"), of_agents("silent")
        evaluated = ", ".join(f"{k[5:]} {v:.3f}" for k, v in row.items() if k.startswith("eval/") and v is not None)
        if bar is None:
            if evaluated:
                print(f"before training, unseen problems: {evaluated}", flush=True)
            return
        bar.set_postfix({"success": f"{success:.2f}", **rewards, "silent": max(silent.values(), default="-")})
        if evaluated or row["step"] % self.every == 0:
            said = [" ".join([kind, ", ".join(f"{agent} {value}" for agent, value in values.items())])
                    for kind, values in (("reward", rewards), ("silent", silent))]
            said += [f"unseen problems: {evaluated}"] if evaluated else []
            guided = ", guided by rewards" * ("success_guided" in row)
            bar.write(f"step {row['step']:>4}  success in training{guided} {success:.2f} | " + " | ".join(said))

    def transcript(self, step: int, samples: list) -> None:
        """All calls of the step's first env."""
        if RANK > 0:
            return
        fields = ("env", "rollout", "agent", "turn", "node", "chosen", "team", "local", "valid", "outcome", "reward",
                  "advantage", "prompt")
        with open(self.run / "transcripts.jsonl", "a") as f:
            for s in samples:
                if s.env == 0:
                    call = {name: getattr(s, name) for name in fields}
                    f.write(json.dumps({"step": step} | call | {"completion": s.completion.text}) + "\n")

    def save(self) -> None:
        """The adapters as they are after the last step, and the curves; the checkpoint before is kept."""
        from mas_rl import save_checkpoint

        step, folder = self.rows[-1]["step"], self.run / "checkpoints"
        if RANK > 0:
            return
        save_checkpoint(folder / f"step-{step:06d}", self.policies, step)
        for old in sorted(folder.glob("step-??????"))[:-2]:
            shutil.rmtree(old)
        if step:
            draw_curves(self.rows, self.run / "curves.png")


def standardised(values: list[float]) -> float | None:
    """The last value, minus the mean of all and divided by their standard deviation."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    std = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
    return (values[-1] - mean) / std if std > 1e-8 else 0.0


def show_title(title: str) -> None:
    print(f"\n{'=' * 20} {title} {'=' * 20}")


def show_play(number: int, success: float, turns: int) -> None:
    show_title(f"play {number + 1}: {'success' if success else 'failure'}, turns: {turns}")


def show_call(turn: int, agent: str, prompt: str, text: str, reward) -> None:
    """One call of a play: the prompt, the answer, and what the env gives for it, a Reward or the same fields of a Sample."""
    earned = f"team reward {reward.team:g}, local {reward.local:g}" + ", could not be parsed" * (not reward.valid)
    print(f"\n--- turn {turn}, {agent} is asked:\n{prompt}\n--- {agent} answers ({earned}):\n{text}")


def show_group(samples: list) -> None:
    """One group of the tree: K candidates of one prompt, and the one that walked on."""
    first = samples[0]
    show_title(f"one group of the tree: {first.agent}, turn {first.turn}, K = {len(samples)}")
    print(f"\n--- all were asked:\n{first.prompt}")
    for s in samples:
        walked = "   <- walked on" * s.chosen
        print(f"\n--- reward {s.reward:g}, advantage {s.advantage:+.3f}{walked}\n{s.completion.text}")


def draw_curves(rows: list[dict], path: Path) -> None:
    """Success, rewards, silent shares and gradient norms over the steps."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"success": ("eval/success", "success", "success_guided"), "reward": ("reward/",),
              "silent share of groups": ("silent/",), "gradient norm": ("grad_norm/",)}
    figure, axes = plt.subplots(1, len(panels), figsize=(18, 3.6), layout="constrained")
    for ax, (title, names) in zip(axes, panels.items()):
        for key in rows[-1]:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points and (key in names or key.startswith(names[0]) and names[0].endswith("/")):
                label = "unseen problems" if key == "eval/success" else key.rsplit("/", 1)[-1]
                ax.plot(*zip(*points), marker="o", markersize=3, label=label)
        ax.set(title=title, xlabel="step")
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend()
    axes[0].set_ylim(-0.02, 1.02)
    axes[2].set_ylim(-0.02, 1.02)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    warnings.formatwarning = lambda message, *where: f"warning: {message}\n"        # one line, without a place in the code
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        if args.evaluate in BASELINES:
            baseline(args)
        else:
            (score if args.evaluate else train)(args)
            if PROCESSES > 1:
                leave_processes()
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted")


if __name__ == "__main__":
    main()
