"""What makes it fast changes no number: shared prompts, several adapters in one call, silent samples left out, chunks, checkpoints."""

import pytest
import torch
from mas_rl import Completion, RoomyLayer, Sample, TokenLogprobs, generate, load_policies, train_step
from test_policy import FAMILIES, PROMPTS, draw, make, moved, randomise, weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM


def group(prompt, completions, env=0):
    return [Sample(env, k, "solver", 0, (), "", Completion(prompt, ids, "", True), True, 0, 0, True, advantage=(-1.0) ** k * (k + 1))
            for k, ids in enumerate(completions)]


LONG, OTHER = list(range(5, 19)) * 3, list(range(18, 4, -1)) * 2            # prompts of 42 and 28 tokens
SAMPLES = group(LONG, [[7, 8, 2], [9], [7, 8, 5, 6, 2], [10, 11]]) + group(OTHER, [[12, 2], [13, 14, 15]], 1) + group([6], [[5, 6, 7]], 2)


def gradient(policy, samples, **how):
    """Weighted sum of the log-probabilities, and its gradient."""
    policy.optimizer.zero_grad()
    logp, mask = policy.logprobs(samples, **how)
    value = (torch.where(mask.bool(), logp, 0) * torch.arange(1, logp.numel() + 1).view_as(logp) / logp.numel()).sum()
    value.backward()
    return logp.detach() * mask, mask, torch.cat([torch.zeros(0) if p.grad is None else p.grad.flatten() for p in policy.parameters])


# -- a group pays for its prompt once: training -----------------------------------------------------------------------


def test_a_row_is_a_prompt_and_all_its_completions(monkeypatch):
    """Prompt 5 6 7, completions 8 9 and 10: each completion is read behind the prompt's last token, at the prompt's positions."""
    policy, seen = make()["solver"], {}
    samples = group([5, 6, 7], [[8, 9], [10]])
    original = policy.model.forward
    monkeypatch.setattr(policy.model, "forward", lambda **how: seen.update(how) or original(**how))
    policy._shared_logprobs(samples, [[0, 1]], False)
    assert seen["input_ids"].tolist() == [[5, 6, 7, 8, 7]] and seen["position_ids"].tolist() == [[0, 1, 2, 3, 2]]
    assert (seen["attention_mask"] == 0).int().tolist() == [[[[1, 0, 0, 0, 0],        # the prompt
                                                              [1, 1, 0, 0, 0],
                                                              [1, 1, 1, 0, 0],        # predicts 8
                                                              [1, 1, 1, 1, 0],        # predicts 9
                                                              [1, 1, 0, 0, 1]]]]      # predicts 10, and sees neither 8 nor its 7
    assert seen["logits_to_keep"] == 3


@FAMILIES
@pytest.mark.parametrize("temperature, reference", [(1.0, False), (0.7, False), (1.0, True)])
def test_a_shared_prompt_gives_the_same_log_probabilities_and_gradients(family, temperature, reference):
    policy = randomise(make(family, temperature=temperature)["solver"])
    assert [len(row) for row in policy._rows(SAMPLES)] == [4, 2, 1]
    if reference:
        with torch.no_grad():
            shared, mask = policy.logprobs(SAMPLES, reference=True)
            policy.shares_prompts = False
            torch.testing.assert_close(shared, policy.logprobs(SAMPLES, reference=True)[0] * mask, atol=1e-5, rtol=0)
        return
    logp, mask, grad = gradient(policy, SAMPLES)
    policy.shares_prompts = False
    assert len(policy._rows(SAMPLES)) == len(SAMPLES)
    for mine, plain in zip((logp, mask, grad), gradient(policy, SAMPLES)):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-5)
    assert grad.abs().max() > 1e-2


def test_shared_prompts_with_fewer_keys_than_queries_and_eager_attention():
    for attention in ("sdpa", "eager"):
        tokenizer = make()["solver"].tokenizer
        config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
                             num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=0, attn_implementation=attention)
        torch.manual_seed(0)
        policy = randomise(load_policies((Qwen3ForCausalLM(config), tokenizer), ("solver",), max_new_tokens=8)["solver"])
        shared = gradient(policy, SAMPLES)
        assert len(policy._rows(SAMPLES)) == 3
        policy.shares_prompts = False
        torch.testing.assert_close(shared, gradient(policy, SAMPLES), atol=1e-5, rtol=1e-5)


def test_a_completion_does_not_see_its_neighbours():
    policy = randomise(make()["solver"])
    with torch.no_grad():
        one, _ = policy.logprobs(group(LONG, [[7, 8, 9], [10, 11, 12]]))
        two, _ = policy.logprobs(group(LONG, [[13, 14, 15], [10, 11, 12]]))
    assert torch.equal(one[1], two[1]) and not torch.equal(one[0], two[0])


def test_a_prompt_is_shared_where_that_is_cheaper():
    """At width 32 a row of L tokens costs L (192 + L): 2 tokens of prompt and 8 completions of 12 are cheaper apart."""
    policy = make()["solver"]
    short = group([5, 6], [[7] * 12] * 8)
    assert 98 * (192 + 98) > 8 * 14 * (192 + 14) and policy._rows(short) == [[k] for k in range(8)]
    long = group([5] * 42, [[7] * 12] * 8)
    assert 138 * (192 + 138) < 8 * 54 * (192 + 54) and policy._rows(long) == [list(range(8))]


def test_a_row_keeps_to_the_token_budget():
    policy = make(batch_tokens=42 + 25)["solver"]
    samples = group(LONG, [[7] * 10] * 5)
    assert policy._rows(samples) == [[0, 1], [2, 3], [4]]
    again = [policy._rows([samples[i] for i in row]) for row in policy._rows(samples)]        # what a micro-batch makes of it
    assert again == [[[0, 1]], [[0, 1]], [[0]]]


@pytest.mark.parametrize("how", [{}, {"epochs": 2, "kl_coef": 0.1}, {"aggregate": "sequence"}])
def test_an_update_is_the_same_with_and_without_shared_prompts(how):
    results = []
    for shares, batch_tokens in ((True, 4096), (True, 60), (False, 4096)):
        policy = randomise(make(lr=1e-3, batch_tokens=batch_tokens)["solver"])
        policy.shares_prompts = shares
        metrics = policy.update(SAMPLES, **how)
        results.append(({k: v for k, v in metrics.items() if v is not None}, torch.cat([w.flatten() for w in weights(policy)])))
    for metrics, w in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-3)
        torch.testing.assert_close(w, results[0][1], atol=1e-4, rtol=0)


def test_a_model_that_cannot_share_says_so_and_goes_on():
    """Windows of attention would have to be cut by position, which such a mask does not do; others answer a trial wrongly."""
    tokenizer = make()["solver"].tokenizer
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                           sliding_window=8, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=0)
    policy = load_policies((MistralForCausalLM(config), tokenizer), ("solver",), max_new_tokens=8)["solver"]
    with pytest.warns(UserWarning, match="a prompt of its own, which is slower: not all its layers attend to everything"):
        logp, mask = policy.logprobs(SAMPLES)
    assert logp.shape == mask.shape == (7, 5) and len(policy.generate(PROMPTS, 2)[1]) == 2

    policy = make()["solver"]
    policy.forward_arguments = policy.forward_arguments - {"position_ids"}
    with pytest.warns(UserWarning, match="no positions or no mask"):
        assert not policy.shares_prompts
    for wrong, reason in ((lambda *_: (torch.zeros(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])), "other numbers"), (lambda *_: torch.zeros(2) @ torch.zeros(3), "a trial failed: ")):
        policy = make()["solver"]
        policy._shared_logprobs = wrong
        with pytest.warns(UserWarning, match=reason):
            assert not policy.shares_prompts


# -- a group pays for its prompt once: sampling -----------------------------------------------------------------------


@FAMILIES
def test_a_shared_cache_gives_the_same_greedy_answers(family):
    """Prompts of unequal length, so with padding; some asked once, some by several; and the cache is computed once for each."""
    policy = randomise(make(family, max_new_tokens=20)["solver"])
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1], "two sums"]
    shared = policy.generate(prompts, 3, temperature=0)
    fed = []
    original = policy._logits
    policy._logits = lambda ids, *rest, **how: fed.append(ids.shape) or original(ids, *rest, **how)
    assert policy.generate(prompts, 3, temperature=0) == shared
    assert fed == [(3, len(policy.prompt_ids(PROMPTS[1])) - 1)]         # three different prompts, without their last token
    policy.shares_prompts = False
    assert policy.generate(prompts, 3, temperature=0) == shared


def test_the_cache_has_room_and_moves_nothing():
    """Tokens are written behind those that are there: the memory stays where it is, the values are those of a plain cache."""
    from transformers.cache_utils import DynamicLayer
    plain, k = DynamicLayer(), torch.arange(2 * 1 * 3 * 2.0).view(2, 1, 3, 2)
    plain.update(k, -k)
    roomy = RoomyLayer(plain, torch.tensor([1, 0, 1]), room=2)
    place = roomy.keys.data_ptr()
    for step in range(2):
        new = torch.full((3, 1, 1, 2), 100.0 + step)
        keys, values = roomy.update(new, -new)
    assert keys.shape == (3, 1, 5, 2) and roomy.get_seq_length() == 5 and keys.data_ptr() == place
    assert torch.equal(keys[:, :, :3], k[[1, 0, 1]]) and keys[0, 0, 3:, 0].tolist() == [100, 101] and torch.equal(values, -keys)


@pytest.mark.parametrize("shares", [True, False])
def test_a_batch_goes_on_without_the_rows_that_have_ended(shares, monkeypatch):
    """Four rows end at 3 tokens, three at a stop token, one at 12: whenever half are gone the others go on alone, each with
    its own adapter, limit and temperature, which is as good as greedy in the long rows and wild in the short ones."""
    policies = make(max_new_tokens={"solver": 3, "verifier": 12}, temperature={"solver": 50.0, "verifier": 1e-6})
    solver, verifier = randomise(policies["solver"]), randomise(policies["verifier"])
    solver.shares_prompts = verifier.shares_prompts = shares
    for p in verifier.parameters:
        p.data *= -1.5
    prompts = [PROMPTS[1], "one", "two sums", "three of four"]
    alone = [verifier.generate([prompt], temperature=0)[0][0].ids for prompt in prompts]
    stops = {alone[0][5], alone[2][3]}
    solver.eos_ids = verifier.eos_ids = stops
    solver.model.generation_config.eos_token_id = list(stops)
    ends = [next((i + 1 for i, token in enumerate(ids) if token in stops), 12) for ids in alone]
    assert ends == [6, 12, 4, 5]
    calls, original = [], solver.model.generate
    monkeypatch.setattr(solver.model, "generate", lambda **how: calls.append(tuple(how["input_ids"].shape)) or original(**how))
    answers = generate([(policy, prompt) for prompt in prompts for policy in (solver, verifier)])
    assert [group[0].ids for group in answers[1::2]] == [ids[:end] for ids, end in zip(alone, ends)]
    assert all(1 <= len(group[0].ids) <= 3 for group in answers[::2])
    assert calls == ([(8, 20), (4, 23), (2, 25), (1, 26)] if shares else [(8, 20)])      # the prompts take 20 tokens


def test_sampled_scores_come_from_the_same_distribution_with_a_shared_cache(monkeypatch):
    policy = randomise(make(temperature=0.7)["solver"])
    scores, original = [], policy.model.generate

    def with_scores(**how):
        out = original(**how, output_scores=True, return_dict_in_generate=True)
        scores.append(torch.stack(out.scores, 1))
        return out.sequences

    monkeypatch.setattr(policy.model, "generate", with_scores)
    samples = draw(policy, prompts=[PROMPTS[1]])
    logp, mask = policy.logprobs(samples)
    tokens, _ = policy._pad([s.completion.ids for s in samples], left=False)
    reported = scores[0].log_softmax(-1).gather(2, tokens[:, :, None]).squeeze(2)
    torch.testing.assert_close(reported * mask, logp.detach() * mask, atol=1e-5, rtol=0)


# -- several adapters in one call -------------------------------------------------------------------------------------


@FAMILIES
def test_agents_of_one_base_are_sampled_in_one_call(family, monkeypatch):
    policies = make(family, max_new_tokens={"solver": 8, "verifier": 12})
    solver, verifier = randomise(policies["solver"]), randomise(policies["verifier"])
    for p in verifier.parameters:
        p.data *= -1.5                          # another voice
    requests = [(solver, PROMPTS[0]), (verifier, PROMPTS[1]), (solver, PROMPTS[1]), (verifier, PROMPTS[1])]
    apart = [policy.generate([prompt], 3, temperature=0)[0] for policy, prompt in requests]
    assert apart[2] != apart[3]
    calls, original = [], solver.model.generate
    monkeypatch.setattr(solver.model, "generate", lambda **how: calls.append(len(how["input_ids"])) or original(**how))
    assert generate(requests, 3, temperature=0) == apart and calls == [12, 6]       # the solver's six end first
    assert max(len(c.ids) for c in apart[0] + apart[2]) <= 8
    assert not any(m._forward_hooks or m._forward_pre_hooks for name, m in solver.model.named_modules() if name.endswith("_proj"))


def test_each_agent_keeps_its_own_temperature_and_stop_strings():
    """A cold solver says one thing; a hot verifier says many and stops at its word."""
    policies = make(temperature={"solver": 1e-6, "verifier": 5.0}, stop={"solver": (), "verifier": ("</answer>",)}, max_new_tokens=30)
    torch.manual_seed(0)
    cold, hot = generate([(policies["solver"], PROMPTS[0]), (policies["verifier"], PROMPTS[1])], 16)
    assert len({c.text for c in cold}) == 1 and len({c.text for c in hot}) > 8
    assert any("</answer>" in c.text for c in hot) and all(c.text.endswith("</answer>") for c in hot if "</answer>" in c.text)


def test_an_error_in_a_mixed_call_leaves_nothing_behind(monkeypatch):
    policies = make()
    solver, verifier = (randomise(p) for p in policies.values())
    samples = draw(solver)
    before = [p.logprobs(samples)[0].detach() for p in (solver, verifier)]
    original = solver.model.generate
    monkeypatch.setattr(solver.model, "generate", lambda **how: original(**how) and 1 / 0)
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        generate([(solver, PROMPTS[0]), (verifier, PROMPTS[0])])
    for policy, logp in zip((solver, verifier), before):
        assert torch.equal(policy.logprobs(samples)[0], logp)


def test_limits_of_two_agents_never_add_up_beyond_the_context(monkeypatch):
    """128 learned positions: a prompt of 100 with 20 new tokens and one of 20 with 100 cannot be padded to one batch."""
    policies = make("gpt2", max_new_tokens={"solver": 20, "verifier": 100})
    calls, original = [], policies["solver"].model.generate
    monkeypatch.setattr(policies["solver"].model, "generate", lambda **how: calls.append(1) or original(**how))
    answers = generate([(policies["solver"], "one two " * 50), (policies["verifier"], "one two " * 10)])
    assert len(calls) == 2 and all(len(c.ids) >= 1 for (c,) in answers)


class Pair:
    """Two agents that act at once, two turns."""
    agents = ("solver", "verifier")

    def __init__(self):
        self.turn, self.queue = 0, list(self.agents)

    def acting(self):
        return tuple(self.queue)

    def observe(self, agent):
        return f"one and {'two ' * (self.turn + 1)}"

    def step(self, agent, action):
        from envs import Reward
        self.queue.remove(agent)
        if not self.queue:
            self.turn += 1
            self.queue = list(self.agents) if self.turn < 2 else []
        return Reward(team=len(action) % 7)

    def success(self):
        return False


@pytest.mark.parametrize("method", ["at-grpo", "dr-mas"])
def test_a_step_makes_one_call_per_base_and_round(method, monkeypatch):
    policies, calls = make(), []
    original = policies["solver"].model.generate
    monkeypatch.setattr(policies["solver"].model, "generate", lambda **how: calls.append(len(how["input_ids"])) or original(**how))
    train_step([Pair(), Pair(), Pair()], policies, method, branches=4)
    assert calls == [3 * 2 * 4] * 2


# -- the update computes only what has a gradient ---------------------------------------------------------------------


def test_token_log_probabilities_by_hand():
    """Two tokens with logits 0 and log 3 at temperature 1: probabilities 1/4 and 3/4. d log p(a) / dz = 1[a] - p."""
    logits = torch.tensor([[[0.0, 3.0]]]).log().nan_to_num(neginf=0.0).requires_grad_()
    logp = TokenLogprobs.apply(logits, torch.tensor([[1]]), 1.0)
    logp.backward(torch.ones(1, 1))
    assert logp.exp().item() == pytest.approx(0.75) and logits.grad.flatten().tolist() == pytest.approx([-0.25, 0.25])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_token_log_probabilities_in_pieces_are_log_softmax(temperature, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(TokenLogprobs, "POSITIONS", 6)          # 3 rows: 2 positions at a time
    logits, tokens = torch.randn(3, 7, 11).to(dtype), torch.randint(11, (3, 7))
    outcomes = []
    for score in (lambda z: TokenLogprobs.apply(z, tokens, temperature), lambda z: (z.float() / temperature).log_softmax(2).gather(2, tokens[:, :, None]).squeeze(2)):
        z = logits.clone().requires_grad_()
        logp = score(z)
        (logp * torch.arange(21.0).view(3, 7)).sum().backward()
        outcomes.append((logp.detach(), z.grad.float()))
    torch.testing.assert_close(*[o[0] for o in outcomes], atol=1e-5, rtol=0)
    torch.testing.assert_close(*[o[1] for o in outcomes], atol=tolerance * 20, rtol=tolerance)


class Large(TorchDispatchMode):
    """Watches the tensors with so many columns: the most values in one, and where in memory those of some size lie."""
    def __init__(self, columns, size):
        super().__init__()
        self.columns, self.size, self.most, self.places = columns, size, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.shape[-1:] == (self.columns,) and x.ndim > 1:
                self.most = max(self.most, x.numel() // self.columns)
                if x.numel() == self.size * self.columns:
                    self.places.add(x.untyped_storage().data_ptr())
        return out


@pytest.mark.parametrize("length", [30, 300])
def test_logits_are_computed_at_the_completions_only_and_held_once(length, monkeypatch):
    """4 samples of 40 tokens: 160 rows of 1000 logits whatever the prompts, once, and once their gradient."""
    monkeypatch.setattr(TokenLogprobs, "POSITIONS", 8)
    tokenizer = make()["solver"].tokenizer
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0))
    policy = load_policies((model, tokenizer), ("solver",), max_new_tokens=8)["solver"]
    assert policy.shares_prompts
    one, four = group([5] * length, [[7] * 40] * 4), [s for k in range(4) for s in group([5 + k] * length, [[7] * 40])]
    for samples in (one, four):
        with Large(1000, 160) as large:
            logp, _ = policy.logprobs(samples)
            logp.sum().backward()
        assert large.most == 160 and len(large.places) == 2, large.places


def test_silent_samples_are_counted_and_not_computed(monkeypatch):
    """Two of seven have advantage 0: the same step as when all are computed, from the log-probabilities of five."""
    results = []
    for leave_out in (True, False):
        policy = randomise(make(lr=1e-3)["solver"])
        assert policy.shares_prompts
        samples = group(LONG, [[7, 8, 2], [9], [7, 8, 5, 6, 2], [10, 11]]) + group(OTHER, [[12, 2], [13, 14, 15]], 1) + group([6], [[5, 6, 7]], 2)
        computed, original = [], policy.logprobs
        monkeypatch.setattr(policy, "logprobs", lambda batch, **how: computed.extend(batch) or original(batch, **how))
        for i in (1, 4):
            samples[i].advantage = 0.0 if leave_out else 1e-30
        metrics = policy.update(samples)
        assert len(computed) == (5 if leave_out else 7)
        results.append((metrics["grad_norm"], torch.cat([w.flatten() for w in weights(policy)])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=0)

    policy = randomise(make()["solver"])
    for s in samples:
        s.advantage = 0.0
    before = weights(policy)
    assert policy.update(samples, kl_coef=0.1)["kl"] > 0 and moved(policy, before)          # the KL has a gradient everywhere


@FAMILIES
def test_checkpointing_changes_the_memory_and_not_the_gradient(family, monkeypatch):
    """GPT-2 has dropout, which stays off; sampling keeps its cache: after the first, each token is computed alone."""
    gradients = []
    for checkpointing in (False, True):
        policy = randomise(make(family, checkpointing=checkpointing)["solver"])
        recomputed = []
        assert policy.shares_prompts
        block = next(m for m in policy.model.modules() if type(m).__name__ in ("LlamaMLP", "GPT2MLP"))
        block.register_forward_pre_hook(lambda m, x: recomputed.append(x[0].shape[1]))
        with torch.no_grad():
            policy.generate(PROMPTS[:1], 2)
        lengths, recomputed[:] = recomputed[1:], []
        assert lengths and set(lengths) == {1}
        gradients.append(gradient(policy, SAMPLES)[2])
        assert len(recomputed) == 1 + checkpointing and not any(m.training for m in policy.model.modules())
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


# -- one policy, one device, one base each ----------------------------------------------------------------------------


def test_two_roles_on_two_bases_of_their_own():
    """Different sizes, tokenizers and chat templates: each policy speaks with its own, and learns alone."""
    small, large = make(agents=("solver",))["solver"], make("gpt2", agents=("solver",))["solver"]
    bases = {"solver": (small.model.unload(), small.tokenizer), "verifier": (large.model.unload(), large.tokenizer)}
    bases["verifier"][1].chat_template = "two {{ messages[0]['content'] }} stop"
    policies = load_policies(bases, ("solver", "verifier"), lr={"solver": 1e-2, "verifier": 0.0}, max_new_tokens=6)
    assert policies["solver"].model is not policies["verifier"].model
    assert policies["verifier"].tokenizer.decode(policies["verifier"].prompt_ids("one")) == "two one stop"
    before = {name: weights(p) for name, p in policies.items()}
    metrics, samples = train_step([Pair(), Pair()], policies, "at-grpo", branches=4)
    assert {s.agent for s in samples} == {"solver", "verifier"} and len(samples) == 2 * 2 * 2 * 4
    assert moved(policies["solver"], before["solver"]) and not moved(policies["verifier"], before["verifier"])
    assert metrics["grad_norm/verifier"] > 0


def test_devices_work_at_the_same_time_and_one_device_in_turn():
    from threading import Barrier

    from mas_rl import side_by_side
    meeting = Barrier(2, timeout=5)                                     # passes only if two are there at once
    assert side_by_side(lambda x: (x, meeting.wait() >= 0)[0], [3, 4], lambda x: f"cuda:{x}") == [3, 4]
    order = []
    assert side_by_side(lambda x: order.append(x) or x, [3, 4, 5], lambda x: "cpu") == order == [3, 4, 5]
    assert side_by_side(lambda x: x, [3, 4, 5, 6], lambda x: x % 2) == [3, 4, 5, 6]


@pytest.mark.parametrize("settings, says", [
    ({"sharing": "shared", "lr": {"solver": 1e-3, "verifier": 1e-4}}, "solver and verifier share the adapter shared"),
    ({"lr": {"solver": 1e-3}}, "lr maps solver; needed is a map of exactly the roles solver, verifier"), ({"sharing": "solver=a"}, "sharing maps solver; needed is \"shared\"")])
def test_maps_that_do_not_fit_the_roles_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        make(**settings)
