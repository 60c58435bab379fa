"""What a tree is, what parallel plays are, and what each method makes of the same samples. Answers are scripted: no model."""

from random import Random

import pytest
import torch
from algorithms import METHODS, Method, Pool, group_advantages
from envs import Math, MathVerify, Problem, Reward
from mas_rl import (Completion, Sample, Scripted, assign_advantages, blank_metrics, check_groups, credit, evaluate, generate, load_policies, parallel_rollout,
                    role, train_step, tree_rollout)


class Guess:
    """Two agents in turn, `coarse` then `fine`, come to a number. What an action is worth is its distance to 10."""

    agents = ("coarse", "fine")

    def __init__(self, turns=1, at_once=False):
        self.turns, self.at_once = turns, at_once

    def reset(self, rng):
        self.value, self.turn, self.queue = 0, 0, list(self.agents)

    def acting(self):
        return tuple(self.queue if self.at_once else self.queue[:1])

    def observe(self, agent):
        return f"{agent}: the value was {self.value if not self.at_once else 'hidden'}"

    def step(self, agent, action):
        self.value += int(action)
        self.queue.remove(agent)
        if not self.queue:
            self.turn += 1
            self.queue = list(self.agents) if self.turn < self.turns else []
        return Reward(team=float(self.value == 10), local=-abs(10 - self.value))

    def success(self):
        return self.value == 10


def fresh(n=1, **settings):
    envs = [Guess(**settings) for _ in range(n)]
    for env in envs:
        env.reset(Random(0))
    return envs


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_the_best_candidate_walks_on():
    """coarse draws 3, 8, 5: 8 is nearest to 10, so fine is asked in the state 8, and 10 is reached with its 2."""
    coarse, fine = Scripted(["3", "8", "5"]), Scripted(["1", "4", "2"])
    envs = fresh()
    samples, finals = tree_rollout(envs, {"coarse": coarse, "fine": fine}, branches=3)
    assert fine.prompts == ["fine: the value was 8"]
    assert [s.chosen for s in samples] == [False, True, False, False, False, True]
    assert [s.node for s in samples] == [()] * 3 + [(1,)] * 3
    assert [s.local for s in samples] == [-7, -2, -5, -1, -2, 0] and finals[0].success()
    assert envs[0].value == 0                           # the root was not touched: winners are copies
    assert [s.outcome for s in samples] == [0, 0, 0, 0, 0, 1] and {s.turns for s in samples} == {1}


def test_the_first_of_equals_walks_on():
    samples, finals = tree_rollout(fresh(), {"coarse": Scripted(["9", "11"]), "fine": Scripted(["0"])}, branches=2)
    assert samples[0].chosen and not samples[1].chosen and finals[0].value == 9


def test_alpha_decides_who_is_best():
    """One candidate earns the team a point, the other earns a point of its own: alpha says what the team's is worth."""
    class Team(Guess):
        def step(self, agent, action):
            super().step(agent, action)
            return Reward(team=float(action == "1"), local=float(action == "2"))

    for alpha, best in ((0.0, "2"), (2.0, "1")):
        env = Team()
        env.reset(None)
        samples, _ = tree_rollout([env], {"coarse": Scripted(["1", "2"]), "fine": Scripted(["0"])}, 2, alpha=alpha)
        assert [s.completion.text for s in samples if s.chosen][0] == best


def test_a_spine_has_k_samples_per_agent_and_turn_and_pure_groups():
    samples, finals = tree_rollout(fresh(3, turns=2), {"coarse": Scripted(["1", "2", "3", "4"]), "fine": Scripted(["0", "1", "2", "1"])}, branches=4)
    assert len(samples) == 3 * 4 * 2 * 2 and len(finals) == 3
    groups = {}
    for s in samples:
        groups.setdefault((s.env, s.agent, s.turn, s.node), []).append(s)
    assert all(len(g) == 4 and len({s.prompt for s in g}) == 1 and sum(s.chosen for s in g) == 1 for g in groups.values())
    check_groups(samples, 4)
    samples[0].prompt = "another"
    with pytest.raises(RuntimeError, match="4 samples of 2 prompts"):
        check_groups(samples, 4)


def test_agents_that_act_at_once_are_scored_in_order_against_the_winner():
    """Both prompts are rendered before anyone steps; fine's candidates are scored on coarse's winner, 7."""
    coarse, fine = Scripted(["7", "1"]), Scripted(["3", "5"])
    samples, finals = tree_rollout(fresh(at_once=True), {"coarse": coarse, "fine": fine}, branches=2)
    assert [s.local for s in samples] == [-3, -9, 0, -2] and finals[0].value == 10
    assert [s.node for s in samples] == [(), (), (0,), (0,)]


def test_everyone_who_generated_is_trained_though_the_first_ended_the_play():
    env = Math(problems=[Problem("What is 47 + 38?", ("85",))])
    env.reset(Random(0))
    samples, finals = tree_rollout([env], {"reasoner": Scripted([r"\boxed{85}", "?"]), "tool": Scripted(["```python\nprint(85)\n```", "?"])}, 2)
    assert [s.agent for s in samples] == ["reasoner", "reasoner", "tool", "tool"] and finals[0].turn == 1


def test_finished_envs_stop_while_others_go_on():
    envs = fresh(1) + fresh(1, turns=3)
    samples, finals = tree_rollout(envs, {"coarse": Scripted(["1"]), "fine": Scripted(["1"])}, 2)
    assert [sum(s.env == e for s in samples) for e in (0, 1)] == [4, 12] and [f.turn for f in finals] == [1, 3]


# -- parallel plays ---------------------------------------------------------------------------------------------------


def test_parallel_plays_share_only_the_first_prompt():
    """The counter-example to grouping by (env, agent, turn): at the second agent each play has its own prompt."""
    coarse, fine = Scripted(["3", "8", "5"]), Scripted(["1", "2", "4"])
    envs = fresh()
    samples, finals = parallel_rollout(envs, {"coarse": coarse, "fine": fine}, branches=3)
    assert len(set(coarse.prompts)) == 1 and len(set(fine.prompts)) == 3 and envs[0].value == 0
    assert [f.value for f in finals] == [4, 10, 9]
    assert [(s.rollout, s.node) for s in samples if s.agent == "fine"] == [(0, (0,)), (1, (1,)), (2, (2,))]
    assert [s.node for s in samples if s.agent == "coarse"] == [()] * 3
    assert all(s.chosen and s.outcome == float(s.rollout == 1) for s in samples)


def test_one_call_of_the_model_per_policy_and_round():
    """16 prompts, one call: not one by one."""
    class Counting(Scripted):
        calls = 0

        def generate(self, prompts, *how):
            Counting.calls += 1
            return super().generate(prompts, *how)

    policy = Counting(["1"])
    parallel_rollout(fresh(8, at_once=True), {"coarse": policy, "fine": policy}, branches=2)
    assert Counting.calls == 1
    results = generate([(policy, "a"), (Scripted(["x"]), "b"), (policy, "c")], n=2)
    assert [[c.text for c in group] for group in results] == [["1", "1"], ["x", "x"], ["1", "1"]]


# -- credit and advantages --------------------------------------------------------------------------------------------


def sample(rollout, agent, outcome, valid=True, turn=0, env=0, **more):
    return Sample(env, rollout, agent, turn, (rollout,), "p", Completion([1], [2], "t", True), True, 0.0, 0.0, valid, outcome=outcome, **more)


def advantages(samples, method, **settings):
    credit(samples, method, **settings)
    assign_advantages(samples, method)
    return [round(s.advantage, 4) for s in samples]


def test_who_pays_for_a_format_error():
    """All four rollouts are wrong; the verifier of rollout 1 was badly formatted. GRPO blames that rollout's solver too."""
    samples = [sample(i, agent, 0.0, valid=(i, agent) != (1, "verifier")) for i in range(4) for agent in ("solver", "verifier")]
    grpo = advantages(samples, "grpo")
    assert grpo[2:4] == [-1.4999, -1.4999] and set(grpo[:2] + grpo[4:]) == {0.5}
    drmas = advantages(samples, "dr-mas")
    assert drmas[0::2] == [0, 0, 0, 0] and drmas[1::2] == [0.5, -1.5, 0.5, 0.5]


def test_the_rows_give_the_golden_vectors():
    """One question, four rollouts: what GRPO and Dr. MAS say to verifier, search and answer agent."""
    plays = ["vsva", "vsvsva", "va", "va"]
    samples = [sample(i, agent, float(i == 0), turn=t) for i, play in enumerate(plays) for t, agent in enumerate(play)]
    assert advantages(samples, "grpo") == [1.5] * 4 + [-0.5] * 10
    right, wrong = {"v": 1.4638, "s": 1.1547, "a": 1.5}, {"v": -0.5855, "s": -0.5773, "a": -0.5}
    expected = [(right if i == 0 else wrong)[agent] for i, play in enumerate(plays) for agent in play]
    assert advantages(samples, "dr-mas") == pytest.approx(expected, abs=1.1e-4)


def test_envs_do_not_know_of_each_other():
    samples = [sample(i, "a", float(i % 2), env=e) for e in (0, 1) for i in range(2)] + [sample(i, "a", 1.0, env=2) for i in range(2)]
    assert advantages(samples, "dr-mas") == [-0.7071, 0.7071, -0.7071, 0.7071, 0, 0] == advantages(samples, "grpo")


def test_step_credit_is_equation_3_and_has_no_penalty():
    one, two = sample(0, "a", 1.0, valid=False), sample(0, "a", 1.0)
    one.team, one.local = 1.0, 0.2
    credit([one, two], "at-grpo", alpha=0.5, penalty=9)
    assert (one.reward, two.reward) == (0.7, 0.0)


def test_one_batch_is_scored_by_every_method_side_by_side():
    """A tree's samples, AT-GRPO's way: each of the two groups of three by itself."""
    samples, _ = tree_rollout(fresh(), {"coarse": Scripted(["3", "8", "5"]), "fine": Scripted(["1", "4", "2"])}, branches=3)
    got = advantages(samples, "at-grpo")
    expected = group_advantages([-7, -2, -5], [0] * 3).tolist() + group_advantages([-1, -2, 1], [0] * 3).tolist()
    assert got == pytest.approx(expected, abs=1e-4)
    assert len(set(advantages(samples, "dr-mas"))) == 3


def test_a_method_of_the_readers_own_is_a_row():
    """Dr. GRPO: no division."""
    dr_grpo = Method("parallel", "outcome", "rollout", Pool(("env",), "rollout"), None)
    assert advantages([sample(i, "a", float(i == 0)) for i in range(4)], dr_grpo) == [0.75, -0.25, -0.25, -0.25]
    with pytest.raises(ValueError, match="credit is 'leaf'"):
        credit([sample(0, "a", 1.0)], METHODS["grpo"]._replace(credit="leaf"))


# -- a whole step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_metrics_of_a_step_and_their_keys(method):
    envs = fresh(2, turns=2)
    policies = {"coarse": Scripted(["8", "3"]), "fine": Scripted(["2", "0"])}
    policies["coarse"].adapter, policies["fine"].adapter = "c", "f"
    metrics, samples = train_step(envs, policies, method, branches=2)
    assert set(metrics) == set(blank_metrics(method, policies))
    assert metrics["calls/coarse"] == (4 if method == "at-grpo" else 2) and metrics["turns"] == 2
    assert metrics["length/fine"] == 1 and metrics["truncated/fine"] == 0 and metrics["invalid/fine"] == 0
    assert ("success_guided" in metrics) == (method == "at-grpo") and metrics["grad_norm/c"] is None
    assert metrics["tokens"] == metrics["calls"] == len(samples)


def test_silent_groups_and_singletons_are_counted():
    """Two envs: in one the answers differ, in the other they agree. One play per env makes every group a group of one."""
    def answers(texts, branches, method="dr-mas"):
        envs = [MathVerify(problems=[Problem("q", ("1",))], single_agent=True) for _ in range(2)]
        for env in envs:
            env.reset(Random(0))
        return train_step(envs, {"solver": Scripted(texts)}, method, branches=branches)[0]

    metrics = answers([r"\boxed{1}", r"\boxed{2}", r"\boxed{2}", r"\boxed{2}"], branches=2)
    assert (metrics["silent/solver"], metrics["singletons"], metrics["success"]) == (0.5, 0, 0.25)
    assert metrics["inflation/solver"] == 1.0           # a lone agent's statistics are the shared ones
    metrics = answers([r"\boxed{1}", r"\boxed{2}"], branches=2)
    assert (metrics["silent/solver"], metrics["inflation/solver"]) == (0.0, 1.0)
    by_turn = METHODS["dr-mas"]._replace(mean=Pool(("env", "agent", "turn", "node"), "call"))
    envs = fresh(2)
    policies = {"coarse": Scripted(["7", "2"]), "fine": Scripted(["3"])}
    metrics, _ = train_step(envs, policies, by_turn._replace(std=by_turn.mean), branches=2)
    assert metrics["singletons"] == 4 and metrics["silent/fine"] == 1.0 and metrics["silent/coarse"] == 0.0


def test_a_step_in_which_every_group_has_one_sample_fails_loudly():
    """Nothing would ever be learned: the rollout in the key, or a single play per problem."""
    policies = {"coarse": Scripted(["1", "2"]), "fine": Scripted(["3"])}
    each_alone = METHODS["grpo"]._replace(mean=Pool(("env", "agent", "rollout"), "call"))
    for method, branches in ((each_alone, 2), ("dr-mas", 1), ("at-grpo", 1)):
        with pytest.raises(ValueError, match="has one sample, which has nothing to be compared with"):
            train_step(fresh(2), policies, method, branches=branches)


def test_evaluation_never_branches_and_leaves_random_streams_alone():
    policies = {"coarse": Scripted(["8", "3"]), "fine": Scripted(["2"])}
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    metrics = evaluate(fresh(4), policies)
    assert metrics == {"eval/success": 0.5, "eval/turns": 1.0} and len(policies["coarse"].prompts) == 4
    metrics = evaluate(fresh(3), policies, k=2)         # each problem: one of two plays succeeds
    assert metrics == {"eval/success": 0.5, "eval/turns": 1.0, "eval/avg@2": 0.5, "eval/pass@2": 1.0}
    assert torch.equal(torch.random.get_rng_state(), before)


def test_roles_of_agents_and_maps_that_miss_one():
    assert [role(agent) for agent in ("solver", "reasoner2", "tool13")] == ["solver", "reasoner", "tool"]
    for sharing, says in (("some", "sharing maps some"), ("a=x", "needed is"), ({"a": "x", "c": "y"}, "exactly the roles a, b")):
        with pytest.raises(ValueError, match=says):
            load_policies((None, None), ("a", "b"), sharing)
