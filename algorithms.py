"""Every equation of the two papers, as pure functions: tensors in, tensors out. Imports torch and numpy only.

GRPO, Dr. MAS (arXiv 2602.08847) and AT-GRPO (arXiv 2510.11062) are one pipeline: sample, give each call its credit,
subtract the mean of a group and divide by a standard deviation, take a clipped step. What differs is which calls are
sampled, credited and compared, so a method is a row of the table METHODS and each paper is a few changed cells.

    rewards = [1, 0, 0, 1]
    group_advantages(rewards, mean_keys=["q"] * 4)          # .866024, -.866024, -.866024, .866024

Words: a *call* is one completion of one agent; a *rollout* is one play of a task from its start to its end; a *group*
is the calls that are compared with each other. Reward is what the environment paid, advantage what the loss multiplies.
"""

from collections.abc import Hashable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


class Pool(NamedTuple):
    """Whose rewards one statistic is taken over."""

    by: tuple[str, ...]     # calls that agree in these fields of a sample form a group
    unit: str               # what counts once in it: "call", or "rollout" (with the mean of its calls)


class Method(NamedTuple):
    sampler: str            # "parallel": K independent rollouts; "tree": branch K ways at each call, the best walks on
    credit: str             # "outcome": success of the rollout minus the penalty; "step": what this very action earned
    score_per: str          # "call": each call keeps its own credit; "rollout": all its calls share their mean
    mean: Pool              # the baseline that is subtracted
    std: Pool | None        # what is divided by; None: nothing
    leave_one_out: bool = False     # the baseline is the mean of the others


ENV, ENV_AGENT, CALL_SITE = ("env",), ("env", "agent"), ("env", "agent", "turn", "node")

METHODS: dict[str, Method] = {
    #                  sampler     credit     score per  mean over                 std over
    "grpo": Method("parallel", "outcome", "rollout", Pool(ENV, "rollout"), Pool(ENV, "rollout")),
    "dr-mas": Method("parallel", "outcome", "call", Pool(ENV_AGENT, "call"), Pool(ENV_AGENT, "call")),
    "at-grpo": Method("tree", "step", "call", Pool(CALL_SITE, "call"), Pool(CALL_SITE, "call")),
}


# ---------------------------------------------------------------------------------------------------------------------
# Rewards and advantages
# ---------------------------------------------------------------------------------------------------------------------


def mixed_reward(team: float, local: float, alpha: float = 1.0) -> float:
    """What one action earns in AT-GRPO.

        r = α · r_team + r_local        (AT-GRPO Eq. 3; α = 1 in the paper)
    """
    return alpha * team + local


def group_advantages(rewards: Sequence[float] | Tensor, mean_keys: Sequence[Hashable],
                     std_keys: Sequence[Hashable] | bool | None = None, mean_units: Sequence[Hashable] | None = None,
                     std_units: Sequence[Hashable] | None = None, leave_one_out: bool = False, ddof: int = 1,
                     eps: float = 1e-6) -> Tensor:
    """Compare each sample with its group.

        A = (r - mean of its mean group) / (std of its std group + eps)      (GRPO; AT-GRPO Eq. 1; Dr. MAS Eq. 2 and 5)

    rewards: (N,), one per sample; keys and units: N hashables. Samples with the same key form a group.
    mean_units, std_units: samples of a group with the same unit enter its statistic once, with their mean; None: every
        sample counts. So the unit of GRPO is the rollout, and that of Dr. MAS the call.
    std_keys: None: the groups and units of the mean; False: no division (Dr. GRPO, RLOO).
    leave_one_out: the mean is taken over the other units of the group (RLOO).
    ddof: 1 divides the squares by n - 1, as both official codes do; 0 by n, as both papers write.

    A group whose values differ by at most 1e-8 says nothing, and neither does a group of one: exactly 0. (Left to eps,
    seven equal rewards of .1 in float32 would give -.8; and 0/0 in a group of one.)
    Returns (N,) in float64. Raises ValueError for unequal lengths and for rewards that are not finite numbers.
    """
    rewards = rewards.detach().double().cpu() if isinstance(rewards, Tensor) else rewards
    r = np.asarray(rewards, dtype=np.float64)                                           # (N,)
    if r.ndim != 1:
        raise ValueError(f"rewards has shape {r.shape}; needed is one number per sample, (N,)")
    if std_keys is None:
        std_keys, std_units = mean_keys, mean_units
    mean_keys, std_keys, mean_units, std_units = (
        x.tolist() if isinstance(x, Tensor) else x for x in (mean_keys, std_keys, mean_units, std_units))
    given = dict(mean_keys=mean_keys, std_keys=std_keys, mean_units=mean_units, std_units=std_units)
    for name, values in given.items():
        if values is not None and values is not False and len(values) != len(r):
            raise ValueError(f"{name} has {len(values)} entries for {len(r)} rewards; needed is one per sample")
    if not np.isfinite(r).all():
        first = int(np.flatnonzero(~np.isfinite(r))[0])
        raise ValueError(f"reward {first} is {r[first]}; needed are finite numbers")

    advantages = np.zeros_like(r)                                                       # (N,)
    for members in _groups(mean_keys):
        units = _unit_means(r, members, mean_units)                                     # unit -> its mean reward
        if len(units) > 1 and np.ptp(r[members]) > 1e-8:
            total = sum(units.values())
            for i in members:
                own = units[i if mean_units is None else mean_units[i]]
                mean = (total - own) / (len(units) - 1) if leave_one_out else total / len(units)
                advantages[i] = r[i] - mean

    if std_keys is not False:
        for members in _groups(std_keys):
            values = np.array(list(_unit_means(r, members, std_units).values()))        # (units of the group,)
            silent = len(values) <= max(1, ddof) or np.ptp(values) <= 1e-8
            advantages[members] = 0 if silent else advantages[members] / (values.std(ddof=ddof) + eps)
    return torch.from_numpy(advantages)                                                 # (N,)


def _groups(keys: Sequence[Hashable]) -> list[list[int]]:
    """Positions that share a key, in order of first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _unit_means(r: np.ndarray, members: list[int], units: Sequence[Hashable] | None) -> dict[Hashable, float]:
    """The mean reward of each unit of one group; without units every sample is its own."""
    values: dict[Hashable, list[float]] = {}
    for i in members:
        values.setdefault(i if units is None else units[i], []).append(r[i])
    return {unit: sum(v) / len(v) for unit, v in values.items()}


def inflation_factor(outcomes: Sequence[float], envs: Sequence[Hashable], rollouts: Sequence[Hashable],
                     agents: Sequence[str]) -> dict[str, np.ndarray]:
    """By how much a shared baseline multiplies the second moment of an agent's gradient.

        E|g_k|² = E|z_k|² · (σ_k² + (μ_k - μ)²) / σ² + Δ_k          (Dr. MAS Lemma 4.2; the factor is returned)

    All arguments: one entry per call; outcomes is R, the rollout's outcome without penalties. μ, σ are taken over the
    rollouts of an env, μ_k, σ_k over agent k's calls in them; population std, as in the lemma. For N rollouts the factor
    is at most N - 1. Returns for each agent one value per env in which it acted and σ > 0.
    """
    if not len(outcomes) == len(envs) == len(rollouts) == len(agents):
        raise ValueError(f"{len(outcomes)} outcomes, {len(envs)} envs, {len(rollouts)} rollouts, {len(agents)} agents: "
                         "needed is one of each per call")
    factors: dict[str, list[float]] = {agent: [] for agent in agents}
    R = np.asarray(outcomes, dtype=np.float64)
    for members in _groups(envs):
        per_rollout = np.array(list(_unit_means(R, members, rollouts).values()))        # (rollouts of this env,)
        mu, var = per_rollout.mean(), per_rollout.var()
        if np.ptp(per_rollout) <= 1e-8:
            continue                                                                    # nothing to inflate
        for agent in dict.fromkeys(agents[i] for i in members):
            own = R[[i for i in members if agents[i] == agent]]                         # (calls of agent k,)
            factors[agent].append((own.var() + (own.mean() - mu) ** 2) / var)
    return {agent: np.array(values) for agent, values in factors.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, clip_low: float = 0.2,
                clip_high: float = 0.2, aggregate: str | int = "token", level: str = "token",
                weights: Tensor | None = None, denominator: float | None = None) -> Tensor:
    """The clipped surrogate, negated so that a descent step raises the objective.

        L = - mean of min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A)        ρ = π(token) / π_old(token)
                                                                        (AT-GRPO Eq. 2, Dr. MAS Eq. 3)

    With one step per batch π_old is π itself: ρ = 1, the clip never acts and the loss is minus the mean advantage, which
    says nothing; its gradient does: that of A · log π. From the second epoch on the clip stops moves beyond 1 ± ε.

    logp, old_logp: (B, T), log-probabilities of the sampled tokens; advantages: (B,) or (B, T);
    mask: (B, T), 1 for tokens of a completion, 0 for padding, whose values do not matter, nan included.
    aggregate: "token": mean over all tokens of the batch; "sequence": mean over a sample's tokens, then over the samples
        (the 1/K mean of Eq. 2); an int L: sum over tokens / (B · L) (Dr. GRPO).
    level: "sequence": one ratio per sample, exp of its mean log-ratio (GSPO).
    weights: (B,), multiply the samples' terms.
    denominator: replaces the number that the sum is divided by (tokens; samples; B · L), so that micro-batches and
        several processes add up to the mean of the whole batch.
    Returns a scalar. Raises ValueError for shapes that do not fit and for unknown words.
    """
    same = logp.ndim == 2 and logp.shape == old_logp.shape == mask.shape
    if not same or advantages.shape not in (logp.shape, logp.shape[:1]):
        raise ValueError(f"shapes do not fit: logp {tuple(logp.shape)}, old_logp {tuple(old_logp.shape)} and mask "
                         f"{tuple(mask.shape)} must be equal, (B, T); advantages {tuple(advantages.shape)} (B,) or (B, T)")
    if aggregate not in ("token", "sequence") and not (isinstance(aggregate, int) and aggregate > 0):
        raise ValueError(f'aggregate is {aggregate!r}; allowed are "token", "sequence" or a positive int')
    if level not in ("token", "sequence"):
        raise ValueError(f'level is {level!r}; allowed are "token" and "sequence"')

    mask = mask.bool()
    lengths = mask.sum(1)                                                               # (B,)
    log_ratio = torch.where(mask, logp - old_logp, 0).clamp(-20, 20)                    # (B, T), exp must not overflow
    if level == "sequence":
        log_ratio = (log_ratio.sum(1) / lengths.clamp(min=1))[:, None].expand_as(logp)  # (B, T), equal within a row
    A = advantages[:, None] if advantages.ndim == 1 else torch.where(mask, advantages, 0)   # (B, 1) or (B, T)
    ratio = log_ratio.exp()                                                             # (B, T)
    surrogate = torch.min(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)      # (B, T)
    if weights is not None:
        surrogate = surrogate * weights[:, None]
    surrogate = torch.where(mask, surrogate, 0)

    if aggregate == "token":
        total, count = surrogate.sum(), lengths.sum()
    elif aggregate == "sequence":
        total, count = (surrogate.sum(1) / lengths.clamp(min=1)).sum(), (lengths > 0).sum()
    else:
        total, count = surrogate.sum(), len(logp) * aggregate
    return -total / (max(int(count), 1) if denominator is None else denominator)


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str = "k3") -> Tensor:
    """Per-token estimates of KL(π || π_ref) from tokens that π sampled, all shapes (B, T).

        k1 = log π - log π_ref      k2 = k1² / 2      k3 = exp(-k1) - 1 + k1        (GRPO uses k3)

    As values all three estimate the KL (k2 with a bias). As losses they differ: the mean gradient of k1 is 0, that of k2
    is the gradient of this KL, that of k3 the gradient of the reversed KL(π_ref || π). Multiplied by the ratio ρ,
    both k1 and k3 give the gradient of this KL.
    """
    k1 = logp - ref_logp                                                                # (B, T)
    if kind == "k1":
        return k1
    if kind == "k2":
        return k1**2 / 2
    if kind == "k3":
        return torch.exp(-k1) - 1 + k1
    raise ValueError(f'kind is {kind!r}; allowed are "k1", "k2", "k3"')


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


def avg_at_k(successes: Sequence[Sequence[float]] | np.ndarray) -> float:
    """Mean success over all problems and their k plays each; successes: (problems, k). Both papers' main measure."""
    return float(np.mean(np.asarray(successes, dtype=np.float64)))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k plays succeeds, estimated without bias from n plays of which c succeeded.

        pass@k = 1 - C(n - c, k) / C(n, k)      (for k = n, as in Dr. MAS: did any play succeed?)

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n = {n} plays, c = {c} successes, k = {k}: needed are 0 <= c <= n and 1 <= k <= n")
    return 1 - comb(n - c, k) / comb(n, k)
