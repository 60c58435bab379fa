"""A team of LLM agents that learns: policies, rollouts, updates, evaluation, and a tiny model to try it all on.

    samples, finals = tree_rollout(envs, policies, branches=4)      # or parallel_rollout: what happened
    credit(samples, "at-grpo")                                      # fills reward
    assign_advantages(samples, "at-grpo")                           # fills advantage
    policies["solver"].update([s for s in samples if policies[s.agent] is policies["solver"]])

`train_step` is these lines. A method is a row of `algorithms.METHODS`; an env is known here by its methods only.
One frozen base model carries one LoRA adapter per policy, `policies[agent]` is the papers' map from agents to policies.

Left out: vLLM, Ray, full fine-tuning, value functions. `generate` is Hugging Face's, the update is a plain loop.
"""

import copy
import hashlib
import inspect
import json
import os
import re
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import load_peft_weights
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig, LlamaConfig,
                          LlamaForCausalLM, LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteriaList)
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from algorithms import (METHODS, Method, Pool, avg_at_k, group_advantages, inflation_factor, kl_estimate, mixed_reward,
                        pass_at_k, policy_loss)

warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")      # between peft and transformers
warnings.filterwarnings("ignore", message="Adapter name .* prefix 'lora_'")     # tested: such names are saved and loaded


# ---------------------------------------------------------------------------------------------------------------------
# 1. What happened: one record per call of a language model
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Completion:
    prompt_ids: list[int]   # exactly the tokens that the model was given
    ids: list[int]          # exactly the tokens that it sampled, the stop token included
    text: str               # the same without special tokens; parsers read this, training never re-encodes it
    stopped: bool           # it ended by itself; False: cut off at the token limit


@dataclass
class Sample:
    env: int                # index in the batch
    rollout: int            # which of the K plays of this env; 0 in a tree
    agent: str
    turn: int
    node: tuple[int, ...]   # branch indices from the root to the state in which this call was made
    prompt: str
    completion: Completion
    chosen: bool            # was this action executed? (in a tree: the best of its group)
    team: float             # the env's Reward
    local: float
    valid: bool
    outcome: float = 0.0    # 1.0 if the rollout ended in success; for a candidate of a tree: if its own state is one
    turns: int = 0          # turns to the end of the play
    reward: float = 0.0     # filled by credit
    advantage: float = 0.0  # filled by assign_advantages


# ---------------------------------------------------------------------------------------------------------------------
# 2. Several processes, several devices. Started by torchrun, each process plays its share of the envs and all make the
#    same update; started without, one process is the whole world and these functions change nothing.
# ---------------------------------------------------------------------------------------------------------------------


def world() -> tuple[int, int]:
    """Which process this is, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def summed(values: Tensor, op: str = "SUM") -> Tensor:
    """The sum (or the MAX) over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values, getattr(dist.ReduceOp, op))
    return values


def gathered(items: list) -> list:
    """The lists of all processes, one after the other."""
    if not dist.is_initialized():
        return items
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return [item for items in lists for item in items]


def side_by_side(work: Callable, items: Sequence, device: Callable[[object], object]) -> list:
    """[work(item) for item in items]: in turn on one device, at the same time on several."""
    queues = list(grouped(range(len(items)), lambda i: str(device(items[i]))).values())
    if len(queues) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(len(queues)) as pool:
        done = list(pool.map(lambda queue: [(i, work(items[i])) for i in queue], queues))
    return [result for _, result in sorted((pair for pairs in done for pair in pairs), key=lambda pair: pair[0])]


def grouped(items: Iterable, key: Callable) -> dict[Hashable, list]:
    """Items by their key, in order of first appearance."""
    groups: dict[Hashable, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# ---------------------------------------------------------------------------------------------------------------------
# 3. A policy: one adapter of a model, with its own optimizer
# ---------------------------------------------------------------------------------------------------------------------


class TokenLogprobs(torch.autograd.Function):
    """log p(a) = z_a / τ - log Σ exp(z / τ)  for tokens a, logits z and temperature τ:  (B, T, V), (B, T) -> (B, T).

    In float32, some positions at a time: of the size of the logits there are only they and, later, their gradient

        ∂ log p(a) / ∂z = (1[a] - softmax(z / τ)) / τ

    where the same in one line, logits.float().log_softmax(2).gather(...), would hold three or four such tensors.
    """

    POSITIONS = 512         # of all rows together

    @staticmethod
    def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """(B, T, ...) cut along T."""
        return zip(*(x.split(max(1, TokenLogprobs.POSITIONS // len(x)), dim=1) for x in tensors))

    @staticmethod
    def forward(ctx, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.temperature = temperature
        logp = torch.empty(tokens.shape, device=logits.device)                                          # (B, T)
        for z, a, out in TokenLogprobs.pieces(logits, tokens, logp):
            z = z.float() / temperature                                                                 # (B, some, V)
            out.copy_(z.gather(2, a[:, :, None]).squeeze(2) - z.logsumexp(2))
        return logp

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens = ctx.saved_tensors
        result = torch.empty_like(logits)                                                               # (B, T, V)
        for z, a, g, out in TokenLogprobs.pieces(logits, tokens, gradient / ctx.temperature, result):
            g = g[:, :, None]                                                                           # (B, some, 1)
            out.copy_((z.float() / ctx.temperature).softmax(2).mul_(-g).scatter_add_(2, a[:, :, None], g))
        return result, None, None


class RoomyLayer(DynamicLayer):
    """One layer's keys and values, each row a copy of one of layer's, with room for so many tokens more.

    A new token is written in place, where a DynamicLayer copies all that came before it, at each token of each layer."""

    def __init__(self, layer: DynamicLayer, copies: Tensor, room: int):
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self.roomy = [torch.cat([x[copies], x.new_empty(len(copies), x.shape[1], room, x.shape[3])], 2)
                      for x in (layer.keys, layer.values)]                              # (B, heads, P+room, d) twice
        self.keys, self.values = (x[:, :, :layer.keys.shape[2]] for x in self.roomy)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        old, new = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        for x, states in zip(self.roomy, (key_states, value_states)):
            x[:, :, old:new] = states
        self.keys, self.values = (x[:, :, :new] for x in self.roomy)
        return self.keys, self.values


class Policy:
    """Weights and optimizer. Both papers' rollout worker is `generate`, their update worker `update`.

    model: a PeftModel with an adapter of this name; several policies may share it. temperature: of sampling, and so of
    the scored distribution too. stop: texts at which a completion ends. batch_tokens: the most tokens, padding included,
    of one forward and backward pass; sampling, which keeps no activations, takes SAMPLING_BATCH times as many at once.
    checkpointing: keep only the layers' inputs in the forward pass of an update, and compute the rest a second time.
    """

    SAMPLING_BATCH = 8
    nothing = dict.fromkeys(("grad_norm", "kl", "clip", "entropy", "ratio_max"))        # what an update measures

    def __init__(self, model, tokenizer, adapter: str, lr: float = 1e-5, max_new_tokens: int = 256,
                 temperature: float = 1.0, stop: Sequence[str] = (), batch_tokens: int = 4096, checkpointing: bool = False):
        self.model, self.tokenizer, self.adapter = model, tokenizer, adapter
        self.max_new_tokens, self.temperature, self.stop = max_new_tokens, temperature, tuple(stop)
        self.batch_tokens, self.checkpointing = batch_tokens, checkpointing
        self.context = getattr(model.config, "max_position_embeddings", None) or 1 << 30
        if max_new_tokens >= self.context:
            raise ValueError(f"max_new_tokens {max_new_tokens} leaves no room for a prompt in a context of {self.context}")
        self.eos_ids = set(as_list(model.generation_config.eos_token_id))
        self.forward_arguments = set(inspect.signature(model.get_base_model().forward).parameters)
        # By name, not by requires_grad: peft switches that off for every adapter but the active one.
        own = re.compile(rf"\.lora_\w+\.{re.escape(adapter)}(\.|$)")
        self.parameters = [p for name, p in model.named_parameters() if own.search(name)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=0.0)
        if checkpointing:
            base = model.get_base_model()
            enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
            enable({"use_reentrant": False})

    @property
    def device(self) -> torch.device:
        return self.model.device

    def activate(self) -> None:
        """Switch the shared base to this adapter. Always eval mode: dropout would make scoring differ from sampling."""
        self.model.set_adapter(self.adapter)
        self.model.eval()

    def prompt_ids(self, prompt: str) -> list[int]:
        """One user message as tokens: through the chat template, thinking off; as plain text where there is none."""
        if self.tokenizer.chat_template is None:
            ids = self.tokenizer(prompt + "\n").input_ids
        else:
            text = self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False,
                                                      add_generation_prompt=True, enable_thinking=False)
            ids = self.tokenizer(text, add_special_tokens=False).input_ids      # the template has written its own BOS
        room = self.context - self.max_new_tokens
        if len(ids) > room:
            warnings.warn(f"a prompt of {len(ids)} tokens lost its beginning: the context leaves room for {room}")
            ids = ids[-room:]
        return ids

    # -- sampling ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], n: int = 1, temperature: float | None = None, top_p: float = 1.0,
                 policies: "Sequence[Policy] | None" = None) -> list[list[Completion]]:
        """Sample n completions of each prompt; temperature None: the policy's own, 0: greedy.

        policies: who answers each prompt, if not all are this one's; they share its base model."""
        policies = policies or [self] * len(prompts)
        rows = [row for policy, prompt in zip(policies, prompts) for row in [(policy, policy.prompt_ids(prompt))] * n]
        sizes = [(len(ids), policy.max_new_tokens) for policy, ids in rows]
        completions: dict[int, Completion] = {}
        for batch in self._batches(sizes, self.SAMPLING_BATCH * self.batch_tokens, self.context):
            completions |= zip(batch, self._sample([rows[i] for i in batch], temperature, top_p))
        return [[completions[i * n + k] for k in range(n)] for i in range(len(prompts))]

    def _sample(self, rows: "list[tuple[Policy, list[int]]]", temperature: float | None, top_p: float) -> list[Completion]:
        """Hugging Face's generate for (policy, prompt) rows, padded on the left.

        It stops when half of the rows have ended, and goes on from where it was with the others alone."""
        policies, prompts = zip(*rows)
        ids, mask = self._pad(prompts, left=True)                                       # (B, P), (B, P)
        start, room = ids.shape[1], max(p.max_new_tokens for p in policies)
        going, results, cache = torch.arange(len(rows), device=self.device), {}, None   # going: (b,), rows that have not ended
        # What is scored is what was sampled: no top-k (transformers keeps 50 by default), no nucleus, no penalty.
        how = dict(do_sample=temperature != 0, max_length=start + room, repetition_penalty=1.0)
        if temperature != 0:
            hot = torch.tensor([[temperature or p.temperature] for p in policies], device=self.device)          # (B, 1)
            hotter = LogitsProcessorList([lambda ids, scores: scores / hot[going]])
            how |= dict(temperature=1.0, top_p=top_p, top_k=0, logits_processor=hotter)
        if start > 1 and self.shares_prompts:
            name = "cache" if "cache" in self.forward_arguments else "past_key_values"      # transformers 5.24, 5.0
            how[name] = cache = self._prefilled(rows, name, room)

        def stop(ids: Tensor, scores: Tensor) -> Tensor:                                # (b, P+t) -> (b,)
            ended = self._ended(policies, ids[:, start:])
            return ended | (2 * ended.sum() >= len(ended)) if cache else ended

        while len(going):
            policies = [rows[i][0] for i in going.tolist()]
            with self._adapters(policies):
                ids = self.model.generate(input_ids=ids, attention_mask=mask, stopping_criteria=StoppingCriteriaList([stop]), **how)
            ended = self._ended(policies, ids[:, start:])                               # (b,), ids: (b, P+t)
            results |= zip(going[ended].tolist(), ids[ended, start:].tolist())
            rest = (~ended).nonzero().flatten()
            new = ids.shape[1] - mask.shape[1]
            going, ids, mask = going[rest], ids[rest], torch.nn.functional.pad(mask[rest], (0, new), value=1)
            for i, layer in enumerate(cache.layers if cache else ()):                   # one by one: each frees the one it replaces
                cache.layers[i] = RoomyLayer(layer, rest, start + room - ids.shape[1])
        return [policy._completion(prompt, results[i]) for i, (policy, prompt) in enumerate(rows)]

    def _prefilled(self, rows: "list[tuple[Policy, list[int]]]", name: str, room: int) -> DynamicCache:
        """The keys and values of the rows' prompts without their last token; each different prompt is computed once."""
        distinct = {(policy.adapter, tuple(ids)): (policy, ids) for policy, ids in rows}
        place = {key: i for i, key in enumerate(distinct)}
        policies, prompts = zip(*distinct.values())
        ids, mask = (x[:, :-1] for x in self._pad(prompts, left=True))                  # (D, P-1), (D, P-1)
        cache = DynamicCache(config=self.model.config)
        with self._adapters(policies):
            self._logits(ids, mask, keep=1, use_cache=True, **{name: cache})            # fills the cache
        copies = torch.tensor([place[policy.adapter, tuple(ids)] for policy, ids in rows], device=self.device)      # (B,)
        cache.layers = [RoomyLayer(layer, copies, room) for layer in cache.layers]
        return cache

    @contextmanager
    def _adapters(self, policies: "Sequence[Policy]") -> Iterator[None]:
        """Row i of the batch is computed with the adapter of policies[i]:

            y = W x + Σ_a m_a B_a A_a x,    m_a = 1 in the rows of adapter a, else 0

        with all A_a stacked in one matrix and all B_a in another: one pass, where peft's adapter_names makes one per adapter.
        """
        policies[0].activate()
        names = list(dict.fromkeys(policy.adapter for policy in policies))
        owner = torch.tensor([[p.adapter == name for name in names] for p in policies], device=self.device)             # (B, adapters)
        def add(A: Tensor, B: Tensor, mine: Tensor) -> Callable:
            return lambda layer, x, y: (y + mine * (x[0].to(A.dtype) @ A.T) @ B.T).to(y.dtype)

        hooks = []
        try:
            for layer in self.model.modules():
                if isinstance(layer, LoraLayer):
                    A = torch.cat([layer.lora_A[name].weight for name in names])                                    # (Σr, in)
                    B = torch.cat([layer.lora_B[name].weight * layer.scaling[name] for name in names], 1)           # (out, Σr)
                    mine = torch.cat([owner[:, [i]].expand(-1, layer.r[name]) for i, name in enumerate(names)], 1)  # (B, Σr)
                    hooks.append(layer.register_forward_hook(add(A, B, mine[:, None].to(A))))                       # (B, 1, Σr)
            with self.model.disable_adapter():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _ended(self, policies: "Sequence[Policy]", new: Tensor) -> Tensor:
        """Which rows hold a stop token or a stop string or have reached their own limit: (B, t) -> (B,).

        generate's own stop_strings fails on some tokenizers."""
        limits = new.new_tensor([p.max_new_tokens for p in policies])                                  # (B,)
        ended = (new.shape[1] >= limits) | torch.isin(new, new.new_tensor(sorted(self.eos_ids))).any(1)  # (B,)
        if any(p.stop for p in policies):
            texts = [p._text(ids) if p.stop else "" for p, ids in zip(policies, new.tolist())]
            ended |= torch.tensor([any(s in text for s in p.stop) for p, text in zip(policies, texts)], device=new.device)
        return ended

    def _completion(self, prompt_ids: list[int], row: list[int]) -> Completion:
        """Cut a row after its first stop token; by position, as the padding behind it may be the same token."""
        row = row[:self.max_new_tokens]
        end = next((i + 1 for i, token in enumerate(row) if token in self.eos_ids), None)
        ids = row[:end]
        if self.stop:       # the shortest beginning whose text holds a stop string
            for i in range(1, len(ids) + 1):
                if any(stop in self._text(ids[:i]) for stop in self.stop):
                    ids, end = ids[:i], i
                    break
        return Completion(prompt_ids, ids, self._text(ids), end is not None)

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    # -- scoring -------------------------------------------------------------------------------------------------------

    def logprobs(self, samples: Sequence[Sample], reference: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the sampled tokens, and 1 where there is one: (B, T), (B, T). reference: the base's."""
        rows = self._rows(samples)
        if len(rows) < len(samples):
            return self._shared_logprobs(samples, rows, reference)
        prompts, prompt_mask = self._pad([s.completion.prompt_ids for s in samples], left=True)         # (B, P)
        tokens, mask = self._pad([s.completion.ids for s in samples], left=False)                       # (B, T)
        ids = torch.cat([prompts, tokens], 1)                                                           # (B, P+T)
        attention = torch.cat([prompt_mask, mask], 1)                                                   # (B, P+T)
        with self._own_weights(reference):                  # the last token is only predicted, so it is not read
            logits = self._logits(ids[:, :-1], attention[:, :-1], keep=tokens.shape[1])                 # (B, T, V)
        return TokenLogprobs.apply(logits, tokens, self.temperature), mask                              # (B, T), (B, T)

    def _shared_logprobs(self, samples: Sequence[Sample], rows: list[list[int]], reference: bool) -> tuple[Tensor, Tensor]:
        """The same numbers, but a row is a prompt, computed once, and all its completions one behind the other.

            reads       p  p  p | p  a  a | p  b  b  b      the prompt's last token stands before each completion
            position    0  1  2 | 3  4  5 | 3  4  5  6      which begins where the prompt ends
            predicts            | a  a  a | b  b  b  b
            owner       0  0  0 | 1  1  1 | 2  2  2  2      a token sees the prompt and its own completion, up to itself
        """
        groups = [[samples[i].completion for i in row] for row in rows]
        def laid_out(values: Callable[[int, Completion], Iterable[int]]) -> tuple[Tensor, Tensor]:      # (R, S), (R, S)
            return self._pad([[x for k, c in enumerate(group) for x in values(k, c)] for group in groups], left=False)

        prompts, prompt_mask = self._pad([group[0].prompt_ids[:-1] for group in groups], left=True)     # (R, P-1)
        before, before_mask = laid_out(lambda k, c: c.prompt_ids[-1:] + c.ids[:-1])                     # (R, S)
        places, _ = laid_out(lambda k, c: range(len(c.prompt_ids) - 1, len(c.prompt_ids) - 1 + len(c.ids)))
        owners, _ = laid_out(lambda k, c: [k + 1] * len(c.ids))                                         # (R, S)
        tokens, _ = laid_out(lambda k, c: c.ids)                                                        # (R, S)
        ids = torch.cat([prompts, before], 1)                                                           # (R, L)
        positions = torch.cat([(prompt_mask.cumsum(1) - 1).clamp(min=0), places], 1)                    # (R, L)
        owner = torch.cat([prompt_mask - 1, owners.where(before_mask.bool(), -1)], 1)                   # (R, L), -1: padding
        seen = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])                      # (R, L, L)
        attention = torch.full(seen.shape, torch.finfo(self.model.dtype).min, dtype=self.model.dtype, device=self.device)
        attention = attention.masked_fill(seen.tril(), 0)[:, None]                                      # (R, 1, L, L)
        with self._own_weights(reference):
            logits = self._logits(ids, attention, positions, keep=tokens.shape[1])                      # (R, S, V)
        logp = TokenLogprobs.apply(logits, tokens, self.temperature)                                    # (R, S)

        cuts = [np.cumsum([len(c.ids) for c in group]).tolist() for group in groups]
        pieces = {i: piece for row, line, cut in zip(rows, logp, cuts) for i, piece in zip(row, line.tensor_split(cut))}
        _, mask = self._pad([s.completion.ids for s in samples], left=False)                            # (B, T)
        return pad_sequence([pieces[i] for i in range(len(samples))], batch_first=True), mask           # (B, T), (B, T)

    def _logits(self, ids: Tensor, attention: Tensor, positions: Tensor | None = None, keep: int = 1,
                use_cache: bool = False, **extra) -> Tensor:
        """The model's logits at the last `keep` positions: (B, L) -> (B, keep, V)."""
        if positions is None:           # padding on the left must not shift them
            positions = (attention.cumsum(1) - 1).clamp(min=0)                                          # (B, L)
        wanted = dict(position_ids=positions, logits_to_keep=keep)
        extra |= {name: value for name, value in wanted.items() if name in self.forward_arguments}
        logits = self.model(input_ids=ids, attention_mask=attention, use_cache=use_cache, **extra).logits
        return logits if logits.shape[1] == keep else logits[:, -keep:]         # a slice would cost a copy in the backward pass

    @contextmanager
    def _own_weights(self, reference: bool = False) -> Iterator[None]:
        """This policy's adapter, or the base alone; with checkpointing, if there will be a backward pass."""
        self.activate()
        # transformers checkpoints in training mode only. The layers are in it, what they are made of is not: no dropout.
        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)] if self.checkpointing else []
        for layer in layers:
            layer.training = torch.is_grad_enabled()
        try:
            with self.model.disable_adapter() if reference else nullcontext():
                yield
        finally:
            for layer in layers:
                layer.training = False

    # -- which completions share a row ---------------------------------------------------------------------------------

    def _rows(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Positions of the samples of each row: those of one prompt together, where that is cheaper, else one by one.

        The cost of a row of L tokens in a layer of width d is about 24 d² L in its matrices and 4 d L² in attention."""
        width, rows = self.model.config.get_text_config().hidden_size, []
        def cost(length: int) -> int:
            return length * (6 * width + length)

        for group in grouped(range(len(samples)), lambda i: tuple(samples[i].completion.prompt_ids)).values():
            prompt = len(samples[group[0]].completion.prompt_ids)
            parts, length = [], self.batch_tokens
            for i in group:             # a row keeps to the token budget
                size = len(samples[i].completion.ids)
                if length + size > self.batch_tokens:
                    parts, length = parts + [[]], prompt
                parts[-1].append(i)
                length += size
            for part in parts:
                sizes = [len(samples[i].completion.ids) for i in part]
                cheaper = cost(prompt + sum(sizes)) < sum(cost(prompt + size) for size in sizes)
                rows += [part] if cheaper and self.shares_prompts else [[i] for i in part]
        return rows

    @cached_property
    def shares_prompts(self) -> bool:
        """Does this model's attention take a mask and positions of our own? Looked up, then tried out; says so if not."""
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
        reason = None
        if kinds or getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            reason = "not all its layers attend to everything"
        elif "position_ids" not in self.forward_arguments or config._attn_implementation not in ("sdpa", "eager"):
            reason = "it takes no positions or no mask of our own"
        else:
            ids = [2 + i % (config.vocab_size - 2) for i in range(9)]
            rows = [Completion(ids[:4], ids[4:6], "", True), Completion(ids[:4], ids[6:], "", True)]
            pair = [Sample(0, k, "", 0, (), "", c, True, 0, 0, True) for k, c in enumerate(rows)]
            try:
                with torch.no_grad():
                    both, mask = self._shared_logprobs(pair, [[0, 1]], False)
                    alone = torch.cat([self.logprobs([s])[0].flatten() for s in pair])
                if not torch.allclose(both[mask.bool()], alone, atol=1e-3 if self.model.dtype == torch.float32 else 0.1):
                    reason = "a trial gave other numbers"
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                reason = f"a trial failed: {error}"
        if reason:
            warnings.warn(f"this model computes every completion with a prompt of its own, which is slower: {reason}")
        return reason is None

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, samples: Sequence[Sample], epochs: int = 1, clip: float = 0.2, kl_coef: float = 0.0,
               aggregate: str | int = "token", max_grad_norm: float = 1.0) -> dict[str, float | None]:
        """One optimizer step per epoch on the clipped loss over the whole batch, whatever the micro-batches and processes.

        kl_coef: weight of KL(policy || base), the base being the same model with its adapter switched off.
        Without KL, samples with advantage 0 have no gradient: they are counted in the mean and not computed. If no others
        are left there is no step, as Adam's momentum alone would still move the weights. A gradient that is not finite
        is not applied.
        Returns grad_norm (before clipping), kl, clip (share of tokens outside the clip range), entropy, ratio_max, over
        the tokens that were computed; None where nothing was measured.
        """
        work = [s for s in samples if kl_coef > 0 or s.advantage != 0]
        counts = [sum(len(s.completion.ids) for s in samples), len(samples), len(work)]
        tokens, count, learning = summed(torch.tensor(counts, device=self.device)).tolist()     # of all processes
        if not learning:
            return self.nothing | ({"grad_norm": 0.0} if count else {})
        denominator = {"token": tokens, "sequence": count}.get(aggregate) or count * aggregate
        rows = [[work[i] for i in row] for row in self._rows(work)]
        sizes = [(len(row[0].completion.prompt_ids), sum(len(s.completion.ids) for s in row)) for row in rows]
        batches = [[s for r in batch for s in rows[r]] for batch in self._batches(sizes, self.batch_tokens)]

        # The sampling policy's log-probabilities stay fixed over the epochs. With one epoch they are the new ones,
        # detached: the ratio is exactly 1, the clip never acts, and a second forward pass would only repeat the first.
        old = [None] * len(batches)
        if epochs > 1:
            with torch.no_grad():
                old = [self.logprobs(batch)[0] for batch in batches]

        sums, ratio_max, grad_norm = Counter(), 0.0, 0.0
        for epoch in range(epochs):
            self.optimizer.zero_grad()
            for batch, old_logp in zip(batches, old):
                logp, mask = self.logprobs(batch)                                       # (B, T), (B, T)
                old_logp = logp.detach() if old_logp is None else old_logp
                advantages = logp.new_tensor([s.advantage for s in batch])              # (B,)
                loss = policy_loss(logp, old_logp, advantages, mask, clip, clip, aggregate, denominator=denominator)
                ratio = torch.where(mask.bool(), logp - old_logp, 0).exp()              # (B, T)
                if kl_coef > 0:
                    with torch.no_grad():
                        ref_logp, _ = self.logprobs(batch, reference=True)              # (B, T)
                    # ρ · k3 has the gradient of KL(policy || base); k3 alone has that of the reverse.
                    kl = torch.where(mask.bool(), ratio * kl_estimate(logp, ref_logp), 0).sum()
                    loss = loss + kl_coef * kl / tokens
                    sums["kl"] += kl.item()
                loss.backward()
                sums["clip"] += ((ratio < 1 - clip) | (ratio > 1 + clip)).sum().item()
                sums["entropy"] -= torch.where(mask.bool(), old_logp, 0).sum().item()
                sums["tokens"] += mask.sum().item()
                ratio_max = max(ratio_max, ratio.max().item())
            self._sum_gradients()
            grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_grad_norm).item()
            if np.isfinite(grad_norm):
                self.optimizer.step()
        self.optimizer.zero_grad()
        totals = torch.tensor([float(sums[name]) for name in ("kl", "clip", "entropy", "tokens")], device=self.device)
        kl, clipped, entropy, computed = summed(totals).tolist()
        ratio_max = summed(torch.tensor(ratio_max, device=self.device), "MAX").item()
        return dict(grad_norm=grad_norm, kl=kl / computed if kl_coef > 0 else None, clip=clipped / computed,
                    entropy=entropy / computed, ratio_max=ratio_max)

    def _sum_gradients(self) -> None:
        """Add the gradients of all processes. Each takes part, with zeros if it had no samples."""
        if dist.is_initialized():
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            flat = summed(torch.cat([g.flatten() for g in gradients]))
            for p, g in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
                p.grad = g.view_as(p)

    # -- batches -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _batches(sizes: list[tuple[int, int]], budget: int, context: float = float("inf")) -> Iterator[list[int]]:
        """Positions of rows (tokens of the prompt, of the completion), sorted by length, in batches of at most budget tokens.

        Padding counts; a row longer than the budget is a batch of its own. context: the most tokens of a padded row."""
        batch, prompt, completion = [], 0, 0
        for i in sorted(range(len(sizes)), key=lambda i: sum(sizes[i])):
            prompt, completion = max(prompt, sizes[i][0]), max(completion, sizes[i][1])
            if batch and ((prompt + completion) * (len(batch) + 1) > budget or prompt + completion > context):
                yield batch
                batch, (prompt, completion) = [], sizes[i]
            batch.append(i)
        if batch:
            yield batch

    def _pad(self, rows: Sequence[list[int]], left: bool) -> tuple[Tensor, Tensor]:
        """Rows of unequal length as one tensor, and its mask, from lengths, not from token values: (B, L), (B, L)."""
        longest = max(map(len, rows))
        padded = torch.full((len(rows), longest), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(padded)
        for i, row in enumerate(rows):
            where = slice(longest - len(row), longest) if left else slice(len(row))
            padded[i, where] = torch.tensor(row, dtype=torch.long)
            mask[i, where] = 1
        return padded.to(self.device), mask.to(self.device)


class Scripted:
    """Answers with the given texts, one after the other and round again, in place of a policy: no model is needed."""

    adapter, device = "scripted", "none"

    def __init__(self, texts: Sequence[str]):
        self.model = self                       # shares its base with nobody
        self.texts, self.prompts, self.given = list(texts), [], 0       # prompts: everything it was asked, for tests

    def generate(self, prompts: Sequence[str], n: int = 1, temperature: float | None = None, top_p: float = 1.0,
                 policies: Sequence | None = None) -> list[list[Completion]]:
        self.prompts += prompts
        return [[self._next(prompt) for _ in range(n)] for prompt in prompts]

    def _next(self, prompt: str) -> Completion:
        text = self.texts[self.given % len(self.texts)]
        self.given += 1
        return Completion(list(range(len(prompt.split()))), list(range(len(text.split()))), text, True)

    def update(self, samples: Sequence[Sample], **how) -> dict[str, float | None]:
        return dict(Policy.nothing)


def generate(requests: Sequence[tuple[Policy, str]], n: int = 1, temperature: float | None = None,
             top_p: float = 1.0) -> list[list[Completion]]:
    """n completions of each (policy, prompt), in the order of the requests.

    All requests to one base model go into one call, whatever their adapters; bases on other devices work side by side."""
    def answer(indices: list[int]) -> list[list[Completion]]:
        policies, prompts = zip(*(requests[i] for i in indices))
        return policies[0].generate(prompts, n, temperature, top_p, policies)

    calls = list(grouped(range(len(requests)), lambda i: id(requests[i][0].model)).values())
    results: dict[int, list[Completion]] = {}
    for indices, answers in zip(calls, side_by_side(answer, calls, lambda indices: requests[indices[0]][0].device)):
        results |= zip(indices, answers)
    return [results[i] for i in range(len(requests))]


# ---------------------------------------------------------------------------------------------------------------------
# 4. From a model to policies
# ---------------------------------------------------------------------------------------------------------------------


def role(agent: str) -> str:
    """Agents are numbered instances of roles: "reasoner2" plays the role "reasoner". Policies belong to roles."""
    return agent.rstrip("0123456789")


def pick_device() -> str:
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def load_model(name: str, device: str | None = None):
    """A causal language model and its tokenizer, by hub id or folder; bfloat16 on a GPU that has it, else float32."""
    device = device or pick_device()
    dtype = torch.bfloat16 if device.startswith("cuda") and torch.cuda.is_bf16_supported() else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True).to(device)
    return model, tokenizer


def load_policies(model, agents: Sequence[str], sharing: str | dict[str, str] = "per-role", rank: int = 16,
                  seed: int = 0, device: str | None = None, **settings) -> dict[str, Policy]:
    """One policy per role (or fewer) on one frozen base, or on several: the map σ from agents to policies.

    model: a hub id, a folder, or a pair (model, tokenizer); it is frozen, and changed in place by peft. A dict gives each
        role its own: roles with the same name, or the same pair, share that base.
    sharing: "shared": one adapter for all; "per-role": one each, named after the role; "solver=a,verifier=a" or a dict: any
        map from roles to adapters. device: where models given by name go.
    settings: of every Policy, lr, max_new_tokens, temperature, ...; each a value, or a dict from roles to values.
    New adapters start as the base itself (LoRA's B is 0). They are float32 on a bfloat16 base too: small steps would vanish.
    Raises ValueError for maps that miss a role, for an adapter on two bases or with two settings, and for names of adapters
    that peft cannot store.
    """
    roles = list(dict.fromkeys(role(agent) for agent in agents))
    if isinstance(sharing, str):
        named = {"shared": dict.fromkeys(roles, "shared"), "per-role": {r: r for r in roles}}
        sharing = named[sharing] if sharing in named else dict(pair.partition("=")[::2] for pair in sharing.split(","))
    for name, value in {"sharing": sharing, "model": model, **settings}.items():
        if isinstance(value, dict) and set(value) != set(roles):
            also = 'is "shared", "per-role" or' * (name == "sharing")
            raise ValueError(f"{name} maps {', '.join(value)}; needed {also or 'is'} a map of exactly the roles {', '.join(roles)}")
    def given_to(r: str) -> tuple:
        own = {name: value[r] if isinstance(value, dict) else value for name, value in settings.items()}
        return model[r] if isinstance(model, dict) else model, own

    for name, users in grouped(roles, sharing.__getitem__).items():
        (base, own), *others = [given_to(r) for r in users]
        if any(other is not base and other != base or theirs != own for other, theirs in others):
            raise ValueError(f"{' and '.join(users)} share the adapter {name}, so they need the same model and settings; give each "
                             "its own adapter, or all the same values")

    torch.manual_seed(seed)                                     # LoRA's A is random
    policies: dict[str, Policy] = {}
    def identity(r: str) -> Hashable:
        base, _ = given_to(r)
        return str(base) if isinstance(base, (str, os.PathLike)) else id(base[0])

    for users in grouped(roles, identity).values():             # the roles of one base
        base, _ = given_to(users[0])
        base, tokenizer = load_model(base, device) if isinstance(base, (str, os.PathLike)) else base
        plain_generation(base, tokenizer)
        adapters = {sharing[r]: given_to(r)[1] for r in users}
        peft_model = add_adapters(base, list(adapters), rank)
        policies |= {name: Policy(peft_model, tokenizer, name, **own) for name, own in adapters.items()}
    return {agent: policies[sharing[role(agent)]] for agent in agents}


def add_adapters(base, names: list[str], rank: int):
    """A PeftModel: the base, frozen, with new LoRA adapters of these names on all its linear layers."""
    modules = {part for name, _ in base.named_modules() for part in name.split(".")}
    taken = modules | set(dir(torch.nn.ModuleDict)) | {"default", "model", "base_model", "base_layer", "weight"}
    for name in names:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in taken:
            raise ValueError(f"adapter name {name!r}: use a letter, then letters, digits, - and _, but no name that stands "
                             "for a part of the model, nor the word default")
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    peft_model = get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        peft_model.add_adapter(name, config)
    return peft_model


def plain_generation(model, tokenizer) -> None:
    """Replace the model's generation settings: those of hub models bring top-k, penalties and n-gram bans."""
    named = (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id)
    eos = {token for ids in named for token in as_list(ids)}
    if not eos:
        raise ValueError("the model has no end-of-sequence token: neither its generation_config nor its config nor its "
                         "tokenizer names one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = min(eos)       # safe: masks come from lengths, never from token values
    if tokenizer.chat_template is None:
        warnings.warn("the tokenizer has no chat template: prompts are given as plain text")
    model.generation_config = GenerationConfig(eos_token_id=sorted(eos), pad_token_id=tokenizer.pad_token_id,
                                               bos_token_id=tokenizer.bos_token_id)


def as_list(value) -> list:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


# ---------------------------------------------------------------------------------------------------------------------
# 5. Rollouts: a tree, or K parallel plays
# ---------------------------------------------------------------------------------------------------------------------


def tree_rollout(envs: Sequence, policies: dict[str, Policy], branches: int, alpha: float = 1.0,
                 clock: Counter | None = None) -> tuple[list[Sample], list]:
    """AT-GRPO's Algorithm 1: at each agent of each turn draw K candidates, score each, walk on from the best.

        a^(1..K) ~ π_σ(i)( · | o )                      one prompt, K candidates
        r^(c) = α r_team(T(s, a^(c))) + r_loc(s, a^(c))  Eq. 3, each on its own copy of the state
        s <- T(s, a^(c*)),  c* = argmax_c r^(c)          the first of equals; only this one is executed

    The tree is a spine: all K candidates are training samples, one of them has descendants. Agents that act at once all
    see the state at the start of the round; their candidates are scored in order, each against the winners so far.
    The play is steered by rewards, so the finals' success is an oracle's and not the team's; `evaluate` has the team's.
    Returns the samples, at most K · agents · turns per env, and the envs at the end (winners, so copies).
    """
    clock = Counter() if clock is None else clock
    envs, samples, nodes = list(envs), [], [() for _ in envs]
    while any(env.acting() for env in envs):
        asked = [(e, agent, env.turn, env.observe(agent)) for e, env in enumerate(envs) for agent in env.acting()]
        with timed(clock, "generate"):
            groups = generate([(policies[agent], prompt) for _, agent, _, prompt in asked], branches)

        for wave in in_waves([(*call, group) for call, group in zip(asked, groups)]):
            states = [[copy.deepcopy(envs[e]) for _ in group] for e, _, _, _, group in wave]
            with timed(clock, "env"):
                paid = iter(step_all([(state, agent, candidate.text)
                                      for (_, agent, _, _, group), copies in zip(wave, states)
                                      for state, candidate in zip(copies, group)]))
            for (e, agent, turn, prompt, group), copies in zip(wave, states):
                rewards = [next(paid) for _ in group]
                scores = [mixed_reward(r.team, r.local, alpha) for r in rewards]
                best = scores.index(max(scores))
                for c, (candidate, r, state) in enumerate(zip(group, rewards, copies)):
                    samples.append(Sample(e, 0, agent, turn, nodes[e], prompt, candidate, c == best, r.team, r.local,
                                          r.valid, outcome=float(state.success())))
                envs[e], nodes[e] = copies[best], nodes[e] + (best,)
    for s in samples:
        s.turns = envs[s.env].turn
    check_groups(samples, branches)
    return samples, envs


def parallel_rollout(envs: Sequence, policies: dict[str, Policy], branches: int, temperature: float | None = None,
                     top_p: float = 1.0, clock: Counter | None = None) -> tuple[list[Sample], list]:
    """K independent plays of every env: the sampler of GRPO and Dr. MAS, and of every evaluation.

    Only the prompts of the first round are the same in the K plays; later ones differ, as each play has its history.
    Returns the samples and the final envs, K per env: those of env e stand at e * K ... e * K + K - 1.
    """
    clock = Counter() if clock is None else clock
    plays, samples = [copy.deepcopy(env) for env in envs for _ in range(branches)], []
    first_round = True                          # the K plays of an env part at their first action
    while any(play.acting() for play in plays):
        asked = [(p, agent, play.turn, play.observe(agent)) for p, play in enumerate(plays) for agent in play.acting()]
        with timed(clock, "generate"):
            answers = generate([(policies[agent], prompt) for _, agent, _, prompt in asked], 1, temperature, top_p)
        for wave in in_waves([(*call, answer) for call, (answer,) in zip(asked, answers)]):
            with timed(clock, "env"):
                rewards = step_all([(plays[p], agent, answer.text) for p, agent, _, _, answer in wave])
            for (p, agent, turn, prompt, answer), r in zip(wave, rewards):
                e, k = divmod(p, branches)
                node = () if first_round else (k,)
                samples.append(Sample(e, k, agent, turn, node, prompt, answer, True, r.team, r.local, r.valid))
        first_round = False
    for s in samples:
        final = plays[s.env * branches + s.rollout]
        s.outcome, s.turns = float(final.success()), final.turn
    return samples, plays


def in_waves(calls: list[tuple]) -> Iterator[list[tuple]]:
    """Cut one round's calls, (env, agent, ...), so that a wave holds at most one agent of each env, in their order."""
    place, waves = Counter(), {}
    for call in calls:
        waves.setdefault(place[call[0]], []).append(call)
        place[call[0]] += 1
    yield from waves.values()


def step_all(jobs: list[tuple]) -> list:
    """env.step(agent, text) for all (env, agent, text) side by side, as a step may wait for a program: the env workers."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: job[0].step(*job[1:]), jobs))


@contextmanager
def timed(clock: Counter, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    clock[name] += time.perf_counter() - start


def check_groups(samples: list[Sample], branches: int) -> None:
    """AT-GRPO compares K candidates of one prompt: every group of a tree has exactly K samples and one prompt."""
    for key, group in grouped(samples, lambda s: (s.env, s.agent, s.turn, s.node)).items():
        prompts = {s.prompt for s in group}
        if len(group) != branches or len(prompts) > 1:
            raise RuntimeError(f"group {key} has {len(group)} samples of {len(prompts)} prompts; needed are "
                               f"{branches} samples of one prompt")


# ---------------------------------------------------------------------------------------------------------------------
# 6. From what happened to what is learned
# ---------------------------------------------------------------------------------------------------------------------


def row_of(method: str | Method) -> Method:
    """The row of the table, by its name; a row of the reader's own is taken as it is."""
    return METHODS[method] if isinstance(method, str) else method


def credit(samples: list[Sample], method: str | Method, alpha: float = 1.0, penalty: float = 0.1) -> None:
    """Fill `reward` as the method's row says.

        outcome:  R - c · 1[the text could not be parsed]     R = 1 if the rollout ended in success, c = penalty
        step:     α · team + local of this very action        AT-GRPO Eq. 3

    score_per "rollout": every call of a rollout gets the mean over the rollout's calls: all answer for one's slip.
    """
    method = row_of(method)
    if method.credit not in ("outcome", "step"):
        raise ValueError(f'credit is {method.credit!r}; allowed are "outcome" and "step"')
    outcome = method.credit == "outcome"
    for s in samples:
        s.reward = s.outcome - penalty * (not s.valid) if outcome else mixed_reward(s.team, s.local, alpha)
    if method.score_per == "rollout":
        for calls in grouped(samples, lambda s: (s.env, s.rollout)).values():
            score = sum(s.reward for s in calls) / len(calls)
            for s in calls:
                s.reward = score


def assign_advantages(samples: list[Sample], method: str | Method) -> None:
    """Fill `advantage`: compare each sample's reward with its group, as the method's row says."""
    method = row_of(method)
    mean_keys, mean_units = pool_of(samples, method.mean)
    std_keys, std_units = pool_of(samples, method.std) if method.std else (False, None)
    rewards = [s.reward for s in samples]
    advantages = group_advantages(rewards, mean_keys, std_keys, mean_units, std_units, method.leave_one_out)
    for s, advantage in zip(samples, advantages.tolist()):
        s.advantage = advantage


def pool_of(samples: list[Sample], pool: Pool) -> tuple[list[tuple], list[tuple] | None]:
    """Keys and units of a Pool for `group_advantages`."""
    keys = [tuple(getattr(s, field) for field in pool.by) for s in samples]
    return keys, [(s.env, s.rollout) for s in samples] if pool.unit == "rollout" else None


def train_step(envs: Sequence, policies: dict[str, Policy], method: str | Method, branches: int = 4, alpha: float = 1.0,
               penalty: float = 0.1, **update) -> tuple[dict[str, float | None], list[Sample]]:
    """Play, give credit, compare, update: one step of any method with any team and any sharing.

    envs: freshly reset; they are not changed. Of several processes, each has its share of the envs; all of an env's calls,
    and so every group, are in one. update goes to `Policy.update`: epochs, clip, kl_coef, aggregate.
    Returns the metrics that the README lists, and the samples, of all processes.
    """
    method = row_of(method)
    clock = Counter()
    if method.sampler == "tree":
        samples, finals = tree_rollout(envs, policies, branches, alpha, clock=clock)
    else:
        samples, finals = parallel_rollout(envs, policies, branches, clock=clock)
    credit(samples, method, alpha, penalty)
    assign_advantages(samples, method)
    if len(set(pool_of(samples, method.mean)[0])) == len(samples):
        raise ValueError(f"every group of {' + '.join(method.mean.by)} has one sample, which has nothing to be compared with: "
                         "nothing would ever be learned; use more branches or a coarser group")

    def learn(policy: Policy) -> dict:          # the papers' router: each policy learns from its own agents' samples
        return policy.update([s for s in samples if policies[s.agent] is policy], **update)

    with timed(clock, "update"):
        learners = distinct(policies)
        updates = dict(zip([p.adapter for p in learners], side_by_side(learn, learners, lambda policy: policy.device)))
    first = world()[0] * len(envs)              # envs are counted through all processes
    samples = gathered([replace(s, env=first + s.env) for s in samples])
    plays = gathered([(env.success(), env.turn) for env in finals])
    return step_metrics(samples, plays, method, policies, updates, clock), samples


def distinct(policies: dict[str, Policy]) -> list[Policy]:
    """Every policy once, in the order of the agents."""
    return list({id(p): p for p in policies.values()}.values())


def step_metrics(samples: list[Sample], plays: list[tuple[bool, int]], method: Method, policies: dict[str, Policy], updates: dict,
                 clock: Counter) -> dict[str, float | None]:
    """One flat dict per step, with the same keys in every step; None where nothing was measured. plays: (success, turns)."""
    guided = "success_guided" if method.sampler == "tree" else "success"
    keys = pool_of(samples, method.mean)[0]
    groups = [[samples[i] for i in group] for group in grouped(range(len(samples)), keys.__getitem__).values()]
    factors = {}
    if method.sampler == "parallel":        # a tree has one rollout per env, and so no spread between rollouts
        columns = zip(*[(s.outcome, s.env, (s.env, s.rollout), s.agent) for s in samples])
        factors = inflation_factor(*columns) if samples else {}

    metrics = {guided: mean([success for success, _ in plays]), "turns": mean([turns for _, turns in plays])}
    for agent in policies:
        own = [s for s in samples if s.agent == agent]
        shared = [group for group in groups if any(s.agent == agent for s in group)]
        metrics |= {f"reward/{agent}": mean([s.reward for s in own]),
                    f"calls/{agent}": len(own) / max(len(plays), 1),
                    f"invalid/{agent}": mean([not s.valid for s in own]),
                    f"length/{agent}": mean([len(s.completion.ids) for s in own]),
                    f"truncated/{agent}": mean([not s.completion.stopped for s in own]),
                    f"silent/{agent}": mean([all(s.advantage == 0 for s in group) for group in shared]),
                    f"inflation/{agent}": mean(factors.get(agent, []))}
    metrics["singletons"] = sum(len(group) == 1 for group in groups)
    for name, values in updates.items():
        metrics |= {f"{key}/{name}": value for key, value in values.items()}
    tokens = sum(len(s.completion.ids) for s in samples)
    metrics |= {f"seconds/{name}": clock[name] for name in ("generate", "env", "update")}
    metrics |= {"tokens_per_second": tokens / max(clock["generate"], 1e-9), "tokens": tokens, "calls": len(samples)}
    return metrics


def blank_metrics(method: str | Method, policies: dict[str, Policy]) -> dict[str, None]:
    """Every key of `train_step`'s metrics, with nothing measured."""
    method = row_of(method)
    nothing = {policy.adapter: Policy.nothing for policy in distinct(policies)}
    return dict.fromkeys(step_metrics([], [], method, policies, nothing, Counter()))


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def evaluate(envs: Sequence, policies: dict[str, Policy], k: int = 1, temperature: float | None = None,
             top_p: float | None = None, seed: int = 0) -> dict[str, float]:
    """Success of the team without any tree, on freshly reset envs; leaves every random stream as it was.

    k = 1 plays greedily, more plays sample at temperature .6 and top_p .95 (both papers), unless told otherwise.
    Of several processes each is given all envs and plays its share of them.
    Returns eval/success and eval/turns, and for k > 1 eval/avg@k and eval/pass@k.
    """
    temperature = (0.0 if k == 1 else 0.6) if temperature is None else temperature
    top_p = (1.0 if k == 1 else 0.95) if top_p is None else top_p
    rank, size = world()
    with torch.random.fork_rng():
        torch.manual_seed(seed + rank)
        _, finals = parallel_rollout(envs[rank::size], policies, k, temperature, top_p)
    plays = np.array(gathered([(env.success(), env.turn) for env in finals]), dtype=float)          # (problems * k, 2)
    successes = plays[:, 0].reshape(len(envs), k)                                                   # (problems, k)
    metrics = {"eval/success": avg_at_k(successes), "eval/turns": mean(plays[:, 1])}
    if k > 1:
        passes = [pass_at_k(k, int(c), k) for c in successes.sum(1)]
        metrics |= {f"eval/avg@{k}": avg_at_k(successes), f"eval/pass@{k}": mean(passes)}
    return metrics


# ---------------------------------------------------------------------------------------------------------------------
# 7. Checkpoints, in peft's own layout
# ---------------------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: str | Path, policies: dict[str, Policy], step: int) -> None:
    """Write each policy's adapter to folder/<adapter>, where PeftModel.from_pretrained loads it. Whole or not at all."""
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for policy in distinct(policies):
        policy.model.save_pretrained(unfinished, selected_adapters=[policy.adapter])
    (unfinished / "README.md").unlink(missing_ok=True)      # peft's model card, an empty form
    (unfinished / "step.json").write_text(json.dumps({"step": step}))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def load_checkpoint(folder: str | Path, policies: dict[str, Policy]) -> int:
    """Read the adapters of `save_checkpoint` into policies of the same names; returns the step.

    Raises FileNotFoundError if one is missing."""
    folder = Path(folder)
    for policy in distinct(policies):
        if not (folder / policy.adapter / "adapter_config.json").exists():
            raise FileNotFoundError(f"{folder} has no adapter {policy.adapter}")
        weights = load_peft_weights(folder / policy.adapter, device=str(policy.model.device))
        set_peft_model_state_dict(policy.model, weights, adapter_name=policy.adapter)
    return json.loads((folder / "step.json").read_text())["step"]


# ---------------------------------------------------------------------------------------------------------------------
# 8. The tiny model: a base that speaks the task's language and makes its teacher's mistakes
# ---------------------------------------------------------------------------------------------------------------------

# The usual initializer_range of .02 is too small for so small a model. Skill first, slips later: `skill` is the share of
# steps in which the expert is imitated, before the imperfect teacher is.
TINY = dict(width=64, layers=2, heads=4, initializer_range=0.08, plays=1000, steps=800, batch=32, lr=5e-3, skill=0.7)
WORD = r" ?(?:</?[a-z]+>|```(?:python)?|\\boxed\{|[A-Za-z]+|[0-9]|[^\sA-Za-z0-9])|\s"      # with the space before it
CHAT = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def tiny_model(make_env: Callable[[], object], seed: int = 0, cache: str | Path | None = None):
    """A small Llama that has learned to imitate the env's imperfect teacher: (model, tokenizer), in float32 on the CPU.

    Made on first use, in one or two minutes, then kept in cache (default: $XDG_CACHE_HOME or ~/.cache, under mas_rl/) in a
    folder named by a hash of what it depends on: the first plays of its teacher, the recipe, the seed.
    """
    recipe = TINY | make_env().recipe
    some = teacher_lessons(make_env, Random(f"{seed}/imitation"), plays=20)     # enough to notice another wording or slip
    key = hashlib.sha256(json.dumps([recipe, WORD, CHAT, seed, some]).encode()).hexdigest()[:16]
    cache = Path(cache or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mas_rl"
    folder = cache / f"tiny-{key}"
    if not (folder / "model.safetensors").exists():
        lessons = teacher_lessons(make_env, Random(f"{seed}/imitation"), recipe["plays"])
        tokenizer = word_tokenizer([text for lesson in lessons for text in lesson])
        model = imitate(lessons, tokenizer, recipe, seed)
        unfinished = cache / f"tiny-{key}.{os.getpid()}"
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def teacher_lessons(make_env: Callable[[], object], rng: Random, plays: int) -> list[tuple[str, str, str]]:
    """Plays of the imperfect teacher: for each call the prompt, what the expert would say, what the teacher said."""
    envs, lessons = [make_env() for _ in range(plays)], []
    for env in envs:
        env.reset(rng)
    while any(env.acting() for env in envs):
        calls = [(e, agent, env.observe(agent), env.solve(agent), env.slip(agent, rng))
                 for e, env in enumerate(envs) for agent in env.acting()]
        lessons += [tuple(texts) for _, _, *texts in calls]
        for wave in in_waves(calls):
            step_all([(envs[e], agent, said) for e, agent, _, _, said in wave])
    return lessons


def word_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Whole words and single digits, with and without a space before them; decoding gives the text back exactly."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<unk>", "<eos>", "<user>", "<assistant>"]
    split = pre_tokenizers.Split(Regex(WORD), "isolated")
    words = {word for text in set(texts) for word, _ in split.pre_tokenize_str(text)} | set("0123456789")
    words |= {word.strip() for word in words if word.strip()} | {" " + word.strip() for word in words if word.strip()}
    vocabulary = {word: i for i, word in enumerate(special + sorted(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>",
                                   additional_special_tokens=["<user>", "<assistant>"], chat_template=CHAT)


def imitate(lessons: list[tuple[str, str, str]], tokenizer: PreTrainedTokenizerFast, recipe: dict, seed: int):
    """Train a Llama from scratch to say what the expert, then the teacher, said to each prompt."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=recipe["width"], intermediate_size=4 * recipe["width"],
        num_hidden_layers=recipe["layers"], num_attention_heads=recipe["heads"], max_position_embeddings=1024,
        initializer_range=recipe["initializer_range"], tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model, rng = LlamaForCausalLM(config), Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe["lr"], total_steps=recipe["steps"], pct_start=0.1)
    for step in tqdm(range(recipe["steps"]), desc="making the tiny base, once", leave=False):
        said = 1 if step < recipe["skill"] * recipe["steps"] else 2     # the expert's answer, then the teacher's
        batch = rng.choices(lessons, k=recipe["batch"])
        asked = [f"<user>{lesson[0]}<assistant>" for lesson in batch]
        texts = [prompt + lesson[said] + "<eos>" for prompt, lesson in zip(asked, batch)]
        ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=False)
        lengths = torch.tensor([len(x) for x in tokenizer(asked).input_ids])                            # (B,)
        answer = torch.arange(ids.input_ids.shape[1]) >= lengths[:, None]                               # (B, L)
        labels = ids.input_ids.where(answer & ids.attention_mask.bool(), -100)                          # (B, L)
        loss = model(**ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()
