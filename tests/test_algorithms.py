"""The two papers, by hand: every equation on numbers that a pencil can check. No model is needed."""

from math import log, sqrt

import numpy as np
import pytest
import torch
from algorithms import (METHODS, avg_at_k, group_advantages, inflation_factor, kl_estimate, mixed_reward, pass_at_k,
                        policy_loss)


def close(a, b, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(a, dtype=float), np.asarray(b, dtype=float), atol=tolerance)


# -- advantages -------------------------------------------------------------------------------------------------------


def test_grpo_by_hand():
    """Mean 1/2; the population std is 1/2, so the right answers get 1; the sample std is 1/sqrt(3)."""
    close(group_advantages([1, 0, 0, 1], ["q"] * 4, ddof=0, eps=0), [1, -1, -1, 1])
    close(group_advantages([1, 0, 0, 1], ["q"] * 4), [0.866024, -0.866024, -0.866024, 0.866024])
    close(group_advantages([1, 0, 0, 0], ["q"] * 4), [1.499997, -0.499999, -0.499999, -0.499999])
    close(group_advantages([2, 1, 0.5, 0], ["q"] * 4), [1.317464, 0.146385, -0.439155, -1.024694])


def test_alpha_separates_doing_your_part_from_winning():
    """team 1,0,0,0 and local 1,0,1,1. With alpha 0 the winner ties with two others; with alpha 1 it stands alone."""
    def advantages(alpha):
        rewards = [mixed_reward(team, local, alpha) for team, local in zip([1, 0, 0, 0], [1, 0, 1, 1])]
        return group_advantages(rewards, ["q"] * 4, ddof=0, eps=0)

    close(advantages(0), [1 / sqrt(3), -sqrt(3), 1 / sqrt(3), 1 / sqrt(3)])
    close(advantages(1), [sqrt(2), -sqrt(2), 0, 0])
    assert mixed_reward(1.0, 0.2, 2.0) == 2.2


def search_team():
    """Dr. MAS's motivation: 8 rollouts, 7 succeed; the search agent speaks once in a success and four times in the failure."""
    outcome = [1] * 7 + [0]
    calls = [(i, "planner", outcome[i]) for i in range(8)] + [(0, "search", 1)] + [(7, "search", 0)] * 4
    rollouts, agents, rewards = map(list, zip(*calls))
    return rollouts, agents, rewards


def test_search_agent_is_blamed_for_being_called():
    rollouts, agents, rewards = search_team()
    q = ["q"] * len(rewards)
    shared = group_advantages(rewards, q, mean_units=rollouts, ddof=0, eps=0)[8:]
    close(shared, [1 / sqrt(7)] + [-sqrt(7)] * 4)
    close((shared**2).mean(), 197 / 35)

    own = group_advantages(rewards, agents, ddof=0, eps=0)[8:]
    close(own, [2, -0.5, -0.5, -0.5, -0.5])
    close((own**2).mean(), 1)


def test_second_moment_identity():
    """Lemma 4.2 with |z| = 1: E[A²] under the shared baseline is the factor (sigma_k² + (mu_k - mu)²) / sigma², exactly."""
    rollouts, agents, rewards = search_team()
    factors = inflation_factor(rewards, ["q"] * len(rewards), rollouts, agents)
    close(factors["search"], [197 / 35])
    close(factors["planner"], [1])


def test_inflation_factor_is_bounded_by_rollouts_minus_one_and_skips_agreeing_envs():
    """An agent that speaks only in the single odd rollout of N reaches N - 1; an env with sigma = 0 has no factor."""
    outcomes, rollouts = [0, 0, 0, 1, 1], [0, 1, 2, 3, 3]
    agents = ["a", "a", "a", "a", "b"]
    close(inflation_factor(outcomes, ["q"] * 5, rollouts, agents)["b"], [3])
    agreeing = inflation_factor([1, 1, 1], ["q"] * 3, [0, 1, 2], ["a", "a", "b"])
    assert agreeing["a"].size == agreeing["b"].size == 0


def test_drmas_is_grpo_when_everyone_speaks_once():
    rewards, rollouts, agents = [1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2], ["a", "b"] * 3
    close(group_advantages(rewards, ["q"] * 6, mean_units=rollouts), group_advantages(rewards, agents))


# One question, four rollouts of a verifier, a search and an answer agent: the first is right, the others are wrong.
CALLS = [(0, a, 1) for a in "vsva"] + [(1, a, 0) for a in "vsvsva"] + [(2, a, 0) for a in "va"] + [(3, a, 0) for a in "va"]
COLUMNS = {     # rows: v s a right, v s a wrong
    "traj": (1.5, 1.5, 1.5, -0.5, -0.5, -0.5),
    "step": (1.5236, 1.5236, 1.5236, -0.6094, -0.6094, -0.6094),
    "agent": (1.4638, 1.1547, 1.5, -0.5855, -0.5773, -0.5),
    "agent_traj": (1.5, 0.7071, 1.5, -0.5, -0.7071, -0.5),
    "mk_s": (1.4286, 1.3333, 1.5, -0.5714, -0.6667, -0.5),
    "m_sk": (1.5370, 1.2990, 1.5, -0.5123, -0.4330, -0.5),
    "agent, population std": (1.5811, 1.4142, 1.7320, -0.6325, -0.7071, -0.5773),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_golden_vectors_of_the_ablations(column):
    rollouts, agents, rewards = map(list, zip(*CALLS))
    q = ["q"] * len(rewards)
    how = {"traj": dict(mean_keys=q, mean_units=rollouts),
           "step": dict(mean_keys=q),
           "agent": dict(mean_keys=agents),
           "agent_traj": dict(mean_keys=agents, mean_units=rollouts),
           "mk_s": dict(mean_keys=agents, std_keys=q, std_units=rollouts),
           "m_sk": dict(mean_keys=q, mean_units=rollouts, std_keys=agents),
           "agent, population std": dict(mean_keys=agents, ddof=0)}[column]
    got = group_advantages(rewards, **how).tolist()
    expected = dict(zip([(1, "v"), (1, "s"), (1, "a"), (0, "v"), (0, "s"), (0, "a")], COLUMNS[column]))
    close(got, [expected[r, a] for _, a, r in CALLS], tolerance=6e-5)


def test_groups_of_mixed_prompts_are_what_at_grpo_avoids():
    """Four rollouts of one question, two of them with a second turn. Pooled by question, turn 1 gets a signal that is none."""
    turns, rewards = [0, 1, 0, 0, 1, 0], [1, 1, 0, 1, 1, 0]
    close(group_advantages(rewards, ["q"] * 6, eps=1e-4), [0.645372, 0.645372, -1.290744, 0.645372, 0.645372, -1.290744])
    close(group_advantages(rewards, turns), [0.866024, 0, -0.866024, 0.866024, 0, -0.866024], tolerance=2e-6)


def test_agents_with_different_rewards_need_their_own_statistics():
    rewards, agents = [0, 1, 0, 1, 10, 11, 10, 11], ["a"] * 4 + ["b"] * 4
    pooled = group_advantages(rewards, ["q"] * 8)
    assert (pooled[:4] < 0).all()               # the right answers of agent a included
    close(group_advantages(rewards, agents), [-0.866024, 0.866024] * 4)


def test_two_groups_do_not_know_of_each_other():
    close(group_advantages([1, 0, 1, 1], [0, 0, 1, 1], eps=1e-4), [0.707007, -0.707007, 0, 0])


def test_a_group_that_agrees_says_nothing():
    """Twelve rewards of 2.3 in float32 have a std of 2e-7 by rounding: left to eps they would give .96 or .19."""
    for rewards in ([1.0], [0.99] * 5, torch.full((12,), 2.3), torch.tensor([0.1] * 7), [0.1 + 0.2, 0.3]):
        assert (group_advantages(rewards, ["q"] * len(rewards)) == 0).all()
        assert (group_advantages(rewards, ["q"] * len(rewards), False) == 0).all()


def test_every_row_its_own_group_gives_zero_and_not_the_raw_reward():
    assert (group_advantages([1, 0, 1, 0], range(4)) == 0).all()
    assert (group_advantages([1, 0, 1, 0], range(4), leave_one_out=True) == 0).all()


def test_a_std_group_without_spread_gives_zero_and_not_half_a_million():
    """(mu, sigma_k): agent b acts only in wrong rollouts, so sigma_b = 0 while mu_b differs from mu."""
    rewards, agents = [1, 0, 1, 0, 0], ["a", "a", "a", "b", "b"]
    got = group_advantages(rewards, ["q"] * 5, std_keys=agents)
    assert (got[3:] == 0).all() and (got[:3] != 0).all()


def test_units_whose_means_agree_are_not_divided_by_nothing():
    assert (group_advantages([1, 0, 0.5, 0.5], ["q"] * 4, mean_units=[0, 0, 1, 1]) == 0).all()


def test_rloo_and_dr_grpo():
    close(group_advantages([2, 0, 1], ["q"] * 3, False, leave_one_out=True), [1.5, -1.5, 0])
    close(group_advantages([2, 0, 1], ["q"] * 3, False), [1, -1, 0])
    close(group_advantages([1, 1, 0], ["q"] * 3, False, mean_units=[0, 0, 1], leave_one_out=True), [1, 1, -1])   # the other rollout


def test_advantages_do_not_depend_on_order_and_shift_and_scale():
    rng = np.random.default_rng(0)
    for _ in range(50):
        n = int(rng.integers(2, 20))
        rewards, keys = rng.normal(size=n), rng.integers(0, 4, n).tolist()
        advantages = group_advantages(rewards, keys, eps=0).numpy()
        order = rng.permutation(n)
        close(group_advantages(rewards[order], [keys[i] for i in order], eps=0), advantages[order])
        close(group_advantages(3 * rewards + 5, keys, eps=0), advantages)
        for key in set(keys):
            close(advantages[np.array(keys) == key].sum(), 0)


def test_what_does_not_fit_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="mean_keys has 3 entries for 4 rewards"):
        group_advantages([1, 0, 1, 0], [0, 0, 0])
    with pytest.raises(ValueError, match="mean_units has 1 entries for 2 rewards"):
        group_advantages([1, 0], [0, 0], mean_units=[1])
    with pytest.raises(ValueError, match="reward 1 is nan"):
        group_advantages([1, float("nan")], [0, 0])
    with pytest.raises(ValueError, match="one number per sample"):
        group_advantages([[1, 0], [0, 1]], [0, 0])
    with pytest.raises(ValueError, match="needed is one of each per call"):
        inflation_factor([1, 0], ["q"], [0, 1], ["a", "a"])
    assert group_advantages([], []).shape == (0,)


def test_tensors_of_any_dtype_are_taken():
    close(group_advantages(torch.tensor([1, 0, 0, 1], dtype=torch.bfloat16), torch.tensor([0, 0, 1, 1])), [0.707106, -0.707106, -0.707106, 0.707106])


def test_the_table_differs_in_the_cells_that_the_papers_change():
    grpo, drmas, atgrpo = METHODS["grpo"], METHODS["dr-mas"], METHODS["at-grpo"]
    assert grpo.sampler == drmas.sampler == "parallel" and atgrpo.sampler == "tree"
    assert grpo.credit == drmas.credit == "outcome" and atgrpo.credit == "step"
    assert grpo.mean == (("env",), "rollout") and drmas.mean == (("env", "agent"), "call")
    assert atgrpo.mean == (("env", "agent", "turn", "node"), "call")
    assert all(method.std == method.mean and not method.leave_one_out for method in METHODS.values())


# -- the loss ---------------------------------------------------------------------------------------------------------

NEW = [[-.5, -1, -.2, -.9], [-1.5, -.3, -.7, -2], [-.1, -.4, -1.2, -.6], [-2, -1.1, -.8, -.3]]
OLD = [[-.6, -.7, -.2, -1.3], [-1.2, -.9, -.7, -2], [-.1, -.8, -1, -.6], [-1.6, -1.5, -.8, -.3]]
REF = [[-.7, -.9, -.4, -1], [-1.4, -.5, -.9, -1.8], [-.3, -.5, -1.1, -.9], [-1.9, -1, -1, -.4]]
MASK = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]


def fixture():
    new, old, ref = (torch.tensor(x, dtype=torch.float64) for x in (NEW, OLD, REF))
    advantages = group_advantages([1, 0, 1, 0.25], [0, 0, 1, 1], eps=1e-4)
    return new.requires_grad_(), old, ref, advantages, torch.tensor(MASK)


@pytest.mark.parametrize("aggregate, loss, total, first, other", [
    ("sequence", 0.02984154, 0.53469068, -0.04883521, 0.10735420),
    ("token", 0.09070657, 0.55253783, -0.06010487, 0.09909618),
    (8, 0.03684954, 0.22446849, -0.02441760, 0.04025782)])
def test_three_ways_to_average_the_loss(aggregate, loss, total, first, other):
    """Four completions of at most four tokens. The expected values come from TRL's loss, and from independent formulas."""
    new, old, _, advantages, mask = fixture()
    got = policy_loss(new, old, advantages, mask, aggregate=aggregate)
    gradient, = torch.autograd.grad(got, new)
    close([got.item(), gradient.abs().sum(), gradient[0, 0], gradient[1, 1]], [loss, total, first, other])


def test_loss_is_zero_but_gradient_is_not():
    """The most asked question about GRPO: on-policy the ratio is 1 and the loss 0, and yet it learns."""
    new, _, _, advantages, mask = fixture()
    loss = policy_loss(new, new.detach(), advantages, mask, aggregate="sequence")
    gradient, = torch.autograd.grad(loss, new)
    close([loss.item(), gradient.abs().sum(), gradient[0, 0], gradient[1, 1]], [0, 0.70699013, -0.04418792, 0.05891723])


@pytest.mark.parametrize("ratio, advantage, gradient", [(2, 1, 0), (2, -1, 2), (0.5, 1, -0.5), (0.5, -1, 0)])
def test_clip_stops_only_moves_that_went_too_far(ratio, advantage, gradient):
    """d loss / d log pi = -ratio * A, or 0 where the policy has already moved far in the direction that A asks for."""
    logp = torch.tensor([[log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss = policy_loss(logp, torch.zeros_like(logp), torch.tensor([float(advantage)], dtype=torch.float64), torch.ones(1, 1))
    close(torch.autograd.grad(loss, logp)[0], [[gradient]])


def test_asymmetric_clip():
    logp = torch.tensor([[log(1.25)]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    close(policy_loss(logp, torch.zeros_like(logp), one, torch.ones(1, 1)), -1.2)
    close(policy_loss(logp, torch.zeros_like(logp), one, torch.ones(1, 1), clip_high=0.28), -1.25)


@pytest.mark.parametrize("aggregate", ["token", "sequence", 8])
def test_micro_batches_add_up_to_the_whole_batch(aggregate):
    new, old, _, advantages, mask = fixture()
    whole = policy_loss(new, old, advantages, mask, aggregate=aggregate)
    denominator = {"token": 13, "sequence": 4, 8: 32}[aggregate]
    parts = sum(policy_loss(new[i:i + 1], old[i:i + 1], advantages[i:i + 1], mask[i:i + 1], aggregate=aggregate, denominator=denominator)
                for i in range(4))
    close(parts.item(), whole.item(), 1e-12)


def test_padding_does_not_matter_even_if_it_is_nan():
    new, old, _, advantages, mask = fixture()
    whole = policy_loss(new, old, advantages, mask)
    worse = torch.where(mask.bool(), new.detach(), float("nan")).requires_grad_()
    loss = policy_loss(worse, old, advantages, mask)
    gradient, = torch.autograd.grad(loss, worse)
    close(loss.item(), whole.item(), 1e-12)
    assert gradient.isfinite().all() and (gradient[mask == 0] == 0).all()


def test_ratios_beyond_float32_are_clipped_and_not_nan():
    """exp(100) is inf in float32: 0 * inf would be nan. With A > 0 the clip stops the move; its gradient is 0."""
    for advantage in (0.0, 1.0):
        logp = torch.full((1, 2), 100.0, requires_grad=True)
        loss = policy_loss(logp, torch.zeros(1, 2), torch.tensor([advantage]), torch.ones(1, 2))
        assert loss.item() == pytest.approx(-1.2 * advantage) and (torch.autograd.grad(loss, logp)[0] == 0).all()


def test_padding_does_not_matter_for_a_sequence_level_ratio_either():
    logp = torch.tensor([[0.1, float("nan")]], requires_grad=True)
    loss = policy_loss(logp, torch.zeros(1, 2), torch.tensor([[1.0, float("inf")]]), torch.tensor([[1, 0]]), level="sequence")
    assert torch.autograd.grad(loss, logp)[0].isfinite().all() and loss.isfinite()


def test_sequence_level_ratio_is_the_geometric_mean_of_the_tokens():
    """Log-ratios .1, -.1, .3 have mean .1: one ratio exp(.1) for all three tokens."""
    logp = torch.tensor([[0.1, -0.1, 0.3]], dtype=torch.float64)
    loss = policy_loss(logp, torch.zeros_like(logp), torch.ones(1, dtype=torch.float64), torch.ones(1, 3), level="sequence")
    close(loss, -np.exp(0.1))


def test_weights_and_token_advantages():
    zeros, mask = torch.zeros(2, 2, dtype=torch.float64), torch.ones(2, 2)
    rows = torch.tensor([1.0, 3.0], dtype=torch.float64)
    close(policy_loss(zeros, zeros, rows, mask), -2)
    close(policy_loss(zeros, zeros, rows[:, None].expand(2, 2), mask), -2)
    close(policy_loss(zeros, zeros, rows, mask, weights=torch.tensor([2.0, 0.0])), -1)


def test_wrong_shapes_and_words_are_errors():
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="shapes do not fit"):
        policy_loss(zeros, zeros, torch.zeros(3), zeros)
    with pytest.raises(ValueError, match="aggregate is 'mean'"):
        policy_loss(zeros, zeros, torch.zeros(2), zeros, aggregate="mean")
    with pytest.raises(ValueError, match="level is 'word'"):
        policy_loss(zeros, zeros, torch.zeros(2), zeros, level="word")
    with pytest.raises(ValueError, match="kind is 'k4'"):
        kl_estimate(zeros, zeros, "k4")


# -- KL ---------------------------------------------------------------------------------------------------------------


def test_kl_estimates():
    """0 where both agree; a token that the reference finds twice as likely: k1 = -log 2, k3 = 2 - 1 - log 2."""
    same, twice = torch.zeros(1, 1), torch.full((1, 1), log(2))
    close([kl_estimate(same, same, k).item() for k in ("k1", "k2", "k3")], [0, 0, 0])
    close([kl_estimate(same, twice, k).item() for k in ("k1", "k2", "k3")], [-log(2), log(2) ** 2 / 2, 1 - log(2)])
    new, _, ref, _, mask = fixture()
    close((kl_estimate(new, ref) * mask).sum().item() / 13, 0.01135234)


def test_kl_gradients_by_enumeration():
    """A policy over three tokens, all of them enumerated: which loss has the gradient of KL(pi || ref)?"""
    theta = torch.tensor([0.2, -0.1, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.4, -0.3], dtype=torch.float64).log_softmax(0)
    pi = theta.log_softmax(0)
    true = (pi.exp() * (pi - ref)).sum()
    close(true.item(), 0.13917483)
    expected = torch.autograd.grad(true, theta, retain_graph=True)[0]
    close(expected, [-0.03049978, -0.19038092, 0.22088070])

    def mean_gradient(kind, with_ratio):
        ratio = (pi - pi.detach()).exp() if with_ratio else 1
        return torch.autograd.grad((pi.exp().detach() * ratio * kl_estimate(pi, ref, kind)).sum(), theta, retain_graph=True)[0]

    close(mean_gradient("k1", False), [0, 0, 0])
    close(mean_gradient("k2", False), expected)
    close(mean_gradient("k3", False), [0.01420930, -0.22179314, 0.20758385])
    close(mean_gradient("k3", True), expected)
    close(mean_gradient("k1", True), expected)


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_pass_at_k_and_avg_at_k():
    close([pass_at_k(10, 3, 1), pass_at_k(10, 3, 5), pass_at_k(4, 2, 2)], [0.3, 0.9166667, 0.8333333])
    assert pass_at_k(16, 0, 16) == 0 and pass_at_k(16, 16, 1) == 1 and pass_at_k(16, 1, 16) == 1
    assert avg_at_k([[1, 0], [1, 1]]) == 0.75
    for n, c, k in ((2, 1, 3), (2, 3, 1), (2, 1, 0)):
        with pytest.raises(ValueError):
            pass_at_k(n, c, k)
