"""What a step costs beside what it is made of: python tests/benchmark.py [--quick]. Not a test; some minutes on one CPU thread.

A Qwen3 of .9 M parameters with random weights, K = 8 completions of 64 tokens that nothing can end, LoRA of rank 16.
The rungs: Hugging Face's generate with num_return_sequences; one forward and backward pass over K separate rows and a step
of AdamW; the plain loop of the two; ours. TRL's GRPOTrainer stands beside them where it is installed: same model, prompts,
lengths. CPU seconds, wall seconds and peak memory of the process (Linux), medians of interleaved repeats, as are the ratios.
The last line is all of it as JSON.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from envs import Reward
from mas_rl import (Completion, Sample, generate, load_policies, parallel_rollout, train_step, tree_rollout,
                    word_tokenizer)
from test_speed import Large
from transformers import Qwen3Config, Qwen3ForCausalLM

K, T = 8, 64
WORDS = [a + b + c for a in "bcdfghjklm" for b in "aeiou" for c in "nprstvwxyz"]


class Seconds(NamedTuple):
    cpu: float
    wall: float


class Talk:
    """Agents that answer prompts of so many tokens, in turn or at once; what an answer earns is random, and so never silent."""

    def __init__(self, length: int, agents: tuple[str, ...] = ("solver",), turns: int = 1, at_once: bool = False):
        self.length, self.agents, self.turns, self.at_once = length, agents, turns, at_once

    def reset(self, rng) -> "Talk":
        self.turn, self.queue, self.words = 0, list(self.agents), [rng.choice(WORDS) for _ in range(self.length - 2)]
        return self

    def acting(self) -> tuple[str, ...]:
        return tuple(self.queue if self.at_once else self.queue[:1])

    def observe(self, agent: str) -> str:
        start = 2 * self.turn + self.agents.index(agent)        # another prompt at each call
        return " ".join(self.words[start:] + self.words[:start])

    def step(self, agent: str, action: str) -> Reward:
        self.queue.remove(agent)
        if not self.queue:
            self.turn += 1
            self.queue = list(self.agents) if self.turn < self.turns else []
        return Reward(team=hash(action) % 1000 / 1000)

    def success(self) -> bool:
        return False


def words_of(length: int, seed: int, **settings) -> Talk:
    from random import Random
    return Talk(length, **settings).reset(Random(seed))


def make_model(vocabulary: int | None = None):
    """(model, tokenizer); its stop token lies beyond the vocabulary, so that every completion has its full length."""
    tokenizer = word_tokenizer([" ".join(WORDS), *WORDS])
    size = vocabulary or len(tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=size, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True,
                         eos_token_id=None, pad_token_id=0, bos_token_id=None)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def make_policies(agents=("solver",), vocabulary: int | None = None, **settings) -> dict:
    return load_policies(make_model(vocabulary), agents, max_new_tokens=T, **{"batch_tokens": 16384} | settings)


# -- the rungs --------------------------------------------------------------------------------------------------------


def plain_generate(policy, prompts: list[str]) -> torch.Tensor:
    """As anyone would write it."""
    policy.activate()
    ids = torch.tensor([policy.prompt_ids(p) for p in prompts])                         # equal lengths
    return policy.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
                                 max_new_tokens=T, num_return_sequences=K)              # (E * K, P+T)


def plain_update(policy, ids: torch.Tensor, optimizer) -> None:
    """One step on all rows at once, each with its own copy of the prompt; advantages +1, -1, +1, ..."""
    policy.activate()
    logits = policy.model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=T).logits
    logp = logits.log_softmax(2).gather(2, ids[:, -T:, None]).squeeze(2)                # (B, T)
    advantages = 1.0 - 2 * (torch.arange(len(ids)) % 2)                                 # (B,)
    ((logp - logp.detach()).exp() * -advantages[:, None]).mean().backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def samples_of(policy, ids: torch.Tensor) -> list[Sample]:
    return [Sample(i // K, i % K, "solver", 0, (), "", Completion(row[:-T].tolist(), row[-T:].tolist(), "", False), True, 0.0, 0.0,
                   True, advantage=1.0 - 2 * (i % 2)) for i, row in enumerate(ids)]


def trl_step(model, tokenizer, prompts: list[str]) -> Callable:
    """A step of TRL's GRPOTrainer: measured by itself, the second of two, as the first warms up."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    marks = []

    class Marks(TrainerCallback):
        def on_step_begin(self, *args, **how):
            marks.append((time.process_time(), time.perf_counter()))

        def on_step_end(self, *args, **how):
            marks.append((time.process_time(), time.perf_counter()))

    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in prompts]})
    config = GRPOConfig(output_dir=tempfile.gettempdir(), per_device_train_batch_size=len(prompts) * K, num_generations=K, beta=0.0, top_k=0,
                        max_completion_length=T, max_steps=2, report_to="none", save_strategy="no", logging_strategy="no",
                        use_cpu=True, bf16=False, fp16=False, learning_rate=1e-5, disable_tqdm=True, log_level="error", gradient_checkpointing=False)
    trainer = GRPOTrainer(model=model, processing_class=tokenizer, args=config, train_dataset=rows, callbacks=[Marks()],
                          reward_funcs=lambda completions, **rest: [hash(str(c)) % 1000 / 1000 for c in completions],
                          peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))

    trainer.remove_callback(PrinterCallback)

    def step() -> Seconds:
        marks.clear()
        trainer.train()
        (c0, w0), (c1, w1) = marks[-2:]
        return Seconds(c1 - c0, w1 - w0)
    return step


class Times(list):
    """(CPU seconds, wall seconds, peak memory in GB) of each repeat of a job."""

    def medians(self) -> list[float]:
        return [statistics.median(column) for column in zip(*self)]

    def over(self, other: "Times") -> float:
        """Median ratio of CPU seconds, of neighbours in time, as a shared machine is now fast, now slow."""
        return statistics.median(mine[0] / its[0] for mine, its in zip(self, other))


def measure(jobs: dict[str, Callable], repeats: int) -> dict[str, Times]:
    """In every repeat all jobs have their turn. The first repeat only warms up. A job may return its own Seconds."""
    times = {name: Times() for name in jobs}
    for repeat in range(repeats + 1):
        for name, job in jobs.items():
            reset_peak()
            cpu, wall = time.process_time(), time.perf_counter()
            own = job()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if repeat:
                times[name].append((*(own if isinstance(own, Seconds) else (cpu, wall)), peak()))
    return times


def ladder(length: int, envs: int, repeats: int, trl: bool) -> dict[str, Times]:
    """One role, one turn: all rungs on the same prompts."""
    policies = make_policies()
    policy = policies["solver"]
    plays = [words_of(length, e) for e in range(envs)]
    prompts = [play.observe("solver") for play in plays]
    optimizer = torch.optim.AdamW(policy.parameters, lr=1e-5)
    with torch.no_grad():
        ids = plain_generate(policy, prompts)
    samples = samples_of(policy, ids)
    jobs = {
        "generate": lambda: plain_generate(policy, prompts),
        "our rollout": lambda: tree_rollout(plays, policies, K),
        "forward, backward, step": lambda: plain_update(policy, ids, optimizer),
        "our update": lambda: policy.update(samples),
        "plain loop": lambda: plain_update(policy, plain_generate(policy, prompts), optimizer),
        "our step": lambda: train_step(plays, policies, "at-grpo", K),
    }
    if trl:
        jobs["TRL's step"] = trl_step(*make_model(), prompts)
    return measure(jobs, repeats)


def teams(repeats: int) -> dict[str, float]:
    """Two roles on one base: calls and time of two turns, and of both at once against one after the other."""
    policies = make_policies(("solver", "verifier"))
    plays = [words_of(128, e, agents=("solver", "verifier"), turns=2) for e in range(4)]
    requests = [(policies[agent], play.observe(agent)) for play in plays for agent in ("solver", "verifier")]
    halves = [[r for r in requests if r[0] is policy] for policy in policies.values()]
    calls = []
    model = policies["solver"].model
    original, model.generate = model.generate, lambda **how: calls.append(1) or original(**how)
    train_step(plays, policies, "at-grpo", K)
    in_turn, calls[:] = len(calls), []
    train_step([words_of(128, e, agents=("solver", "verifier"), turns=2, at_once=True) for e in range(4)], policies, "at-grpo", K)
    at_once = len(calls)
    model.generate = original
    times = measure({"step": lambda: train_step(plays, policies, "at-grpo", K), "one call": lambda: generate(requests, K),
                     "half batches": lambda: [generate(half, K) for half in halves]}, repeats)
    return {"two roles, two turns, K = 8: CPU s a step": times["step"].medians()[0], "generate calls, in turn (4 rounds)": in_turn,
            "generate calls, at once (2 rounds)": at_once, "both roles in one call / two half batches": times["one call"].over(times["half batches"])}


def scaling(repeats: int) -> dict[str, float]:
    """CPU time per generated token, from 8 to 64 envs."""
    policies = make_policies()
    few, many = ([words_of(128, e) for e in range(n)] for n in (8, 64))
    times = measure({"8": lambda: parallel_rollout(few, policies, K), "64": lambda: parallel_rollout(many, policies, K)}, repeats)
    return {"CPU time per token, 64 envs / 8 envs": times["64"].over(times["8"]) * 8 / 64}


def memory(length: int) -> dict[str, float]:
    """Peak memory of an update: vocabulary 152,000, 8 rows of 512 completion tokens. Run in a process of its own."""
    rows, new, vocabulary = 8, 512, 152_000
    policy = make_policies(vocabulary=vocabulary, batch_tokens=rows * (length + new))["solver"]
    def batch(prompts: list[int]) -> list[Sample]:
        return [Sample(0, i, "solver", 0, (), "", Completion([2 + (p + j) % 900 for j in range(length)], list(range(2, 2 + new)), "", False),
                       True, 0.0, 0.0, True, advantage=1.0 - 2 * (i % 2)) for i, p in enumerate(prompts)]
    result = {}
    for name, prompts in (("8 prompts", list(range(8))), ("one prompt", [0] * 8)):
        samples, before = batch(prompts), reset_peak()
        with Large(vocabulary, rows * new) as large:
            policy.update(samples)
        result[name] = peak() - before
        assert 0 < large.most <= rows * new, large.most
    return result


def reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")       # Linux: the peak begins anew
    return peak()


def peak() -> float:
    """Peak resident memory in GB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e6


def first_step() -> dict[str, float]:
    """CPU seconds from the start of train.py to the end of its first step, beyond the imports; the base is made before."""
    def seconds(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        def run(flags: str) -> float:
            return seconds(str(root / "train.py"), "--steps", "1", "--out", f"{folder}/{flags}", *flags.split())
        run("--eval-n 0")
        imports = statistics.median(seconds("-c", f"import sys; sys.path.insert(0, {str(root)!r}); import train, mas_rl, matplotlib.pyplot") for _ in range(3))
        return {"train.py --task math to the end of step 1, beyond imports: CPU s": run("--eval-n 0 --seed 1") - imports,
                "the same with its two evaluations of 200 problems": run("--seed 2") - imports}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, no prompts of 2048 tokens")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.memory:
        print(json.dumps(memory(args.memory)))
        return
    try:
        import trl
        beside = f"TRL {trl.__version__}"
    except ImportError:
        beside = None
    repeats, results = 1 if args.quick else 5, {"torch": torch.__version__, "trl": beside}
    print(f"torch {torch.__version__}, one thread, {beside or 'TRL is not installed'}; CPU seconds (wall seconds), peak memory, ratio of CPU seconds\n")
    against = {"our rollout": "generate", "our update": "forward, backward, step", "our step": "plain loop", "TRL's step": "our step"}
    for length, envs in ((32, 8), (512, 4), (2048, 2))[:2 if args.quick else 3]:
        times = ladder(length, envs, repeats, beside is not None)
        print(f"prompts of {length} tokens, {envs} of them, K = {K}, {T} new tokens")
        for name, values in times.items():
            cpu, wall, memory_peak = values.medians()
            ratio = f"{values.over(times[against[name]]):7.2f} x {against[name]}" if name in against else ""
            print(f"  {name:<26} {cpu:8.3f} ({wall:.3f}) {memory_peak:6.2f} GB {ratio}")
        results[f"prompt {length}"] = {name: values.medians() for name, values in times.items()}
    for name, value in (teams(repeats) | scaling(repeats) | first_step()).items():
        print(f"{name:<72} {value:.3f}")
        results[name] = value
    for length in (128, 2048):
        done = subprocess.run([sys.executable, __file__, "--memory", str(length)], capture_output=True, text=True, check=True)
        results[f"memory {length}"] = json.loads(done.stdout)
        for name, gigabytes in results[f"memory {length}"].items():
            print(f"{f'peak of an update, vocabulary 152,000, 8 x 512 tokens, {name} of {length}':<72} {gigabytes:.2f} GB")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
