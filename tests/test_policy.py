"""Invariants that no equation shows: what is scored is what was sampled, and an update moves what it should and nothing else.

The models are random and small: a Llama (rotary positions) and a GPT-2 (learned positions, no pad token, dropout)."""

import copy
import json

import pytest
import torch
from mas_rl import (Completion, Policy, Sample, distinct, load_checkpoint, load_policies, plain_generation, role, save_checkpoint, word_tokenizer)
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel, GenerationConfig, LlamaConfig, LlamaForCausalLM

WORDS = "the solver says that one and two are three but a verifier of sums finds four </answer> stop".split()
PROMPTS = ["one", "the solver says that one and two are three but a verifier finds four of one and two"]     # 1 and 17 words


def make(family="llama", agents=("solver", "verifier"), sharing="per-role", chat=True, **settings):
    tokenizer = word_tokenizer([" ".join(WORDS), *WORDS])
    torch.manual_seed(0)
    size = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, initializer_range=0.15)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0, **size))
    else:
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **size))
        tokenizer.pad_token = None
    if not chat:
        tokenizer.chat_template = None
    # what hub models bring along, and what must not reach the sampler
    model.generation_config = GenerationConfig(top_k=3, top_p=0.5, temperature=0.1, repetition_penalty=1.7, no_repeat_ngram_size=2, do_sample=True,
                                               eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return load_policies((model, tokenizer), agents, sharing, **{"max_new_tokens": 12, "lr": 1e-2} | settings)


def randomise(policy):
    """Give the adapter an effect: LoRA's B starts at 0."""
    torch.manual_seed(1)
    for p in policy.parameters:
        p.data += 0.1 * torch.randn_like(p)
    return policy


def draw(policy, n=8, prompts=PROMPTS, agent="solver"):
    torch.manual_seed(2)
    return [Sample(e, k, agent, 0, (), prompt, completion, True, 0.0, 0.0, True, advantage=1.0 if k % 2 else -1.0)
            for e, (prompt, group) in enumerate(zip(prompts, policy.generate(prompts, n))) for k, completion in enumerate(group)]


FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2"])


# -- sampling and scoring ---------------------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_is_scored_is_what_was_sampled(family, temperature, monkeypatch):
    """The scores that generate reports are the whole distribution at this temperature, and logprobs finds the same numbers.

    Prompts of unequal length, so with padding; generation settings of the model that would cut the distribution."""
    policy = randomise(make(family, temperature=temperature)["solver"])
    scores = []
    original = policy.model.generate

    def with_scores(**how):
        out = original(**how, output_scores=True, return_dict_in_generate=True)
        scores.append(torch.stack(out.scores, 1))                                                   # (B * n, T, V)
        return out.sequences

    monkeypatch.setattr(policy.model, "generate", with_scores)
    samples = draw(policy)
    assert len(scores) == 1 and scores[0].isfinite().all()          # no top-k, no top-p
    logp, mask = policy.logprobs(samples)
    reported = scores[0].log_softmax(-1)
    for i, s in enumerate(samples):
        for t, token in enumerate(s.completion.ids):
            assert abs(reported[i, t, token] - logp[i, t]) < 1e-5, (i, t)
    assert mask.sum(1).tolist() == [len(s.completion.ids) for s in samples]


@FAMILIES
def test_a_batch_of_one_is_a_batch_of_many(family):
    policy = randomise(make(family)["solver"])
    samples = draw(policy)
    logp, mask = policy.logprobs(samples)
    for i, s in enumerate(samples):
        alone, _ = policy.logprobs([s])
        torch.testing.assert_close(alone[0], logp[i, :alone.shape[1]], atol=1e-5, rtol=0)
    assert torch.equal(policy.logprobs(samples)[0], logp)           # and twice the same: there is no dropout


def test_the_mask_comes_from_lengths_not_from_values():
    """pad = eos, as in many hub models: [5, 6, EOS] padded to 6 has 3 tokens, EOS among them."""
    policy = make("gpt2")["solver"]
    eos = policy.tokenizer.eos_token_id
    assert policy.tokenizer.pad_token_id == eos
    row = policy._completion([1], [5, 6, eos, eos, eos, eos])
    assert (row.ids, row.stopped) == ([5, 6, eos], True)
    cut = policy._completion([1], [5, 6, 7, 8, 9])
    assert (cut.ids, cut.stopped) == ([5, 6, 7, 8, 9], False)
    samples = [Sample(0, k, "solver", 0, (), "", c, True, 0, 0, True) for k, c in enumerate((row, cut))]
    assert policy.logprobs(samples)[1].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


def test_any_of_several_stop_tokens_ends_a_completion():
    policies = make()
    model, tokenizer = policies["solver"].model.get_base_model(), policies["solver"].tokenizer
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id, 9])
    plain_generation(model, tokenizer)
    policy = Policy(policies["solver"].model, tokenizer, "solver")
    assert policy.eos_ids == {tokenizer.eos_token_id, 9}
    assert policy._completion([1], [7, 9, 5, 5]) == Completion([1], [7, 9], policy._text([7, 9]), True)


def test_a_model_without_any_stop_token_is_refused():
    policies = make()
    model, tokenizer = policies["solver"].model.get_base_model(), copy.deepcopy(policies["solver"].tokenizer)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        plain_generation(model, tokenizer)


def test_stop_strings_end_the_text_and_are_trained():
    policy = make(stop=["</answer>"], max_new_tokens=40)["solver"]
    ids = policy.tokenizer(" three</answer> four", add_special_tokens=False).input_ids
    assert policy._completion([1], ids).text == " three</answer>"
    ended = [c for c in policy.generate(PROMPTS, 16)[0] if "</answer>" in c.text]
    assert ended and all(c.text.endswith("</answer>") and c.stopped and policy._text(c.ids) == c.text for c in ended)


def test_greedy_twice_is_the_same_and_sampling_goes_on_unaffected():
    policy = randomise(make()["solver"])
    one, two = (policy.generate(PROMPTS, 2, temperature=0) for _ in range(2))
    assert one == two and one[0][0] == one[0][1]
    assert len({c.text for c in policy.generate(PROMPTS, 8)[1]}) > 1


def test_each_call_is_trained_on_exactly_the_tokens_it_was_given(monkeypatch):
    """Token in, token out: no completion is decoded and encoded again. Prompts sorted by length come back in order."""
    policy, given = make()["solver"], []
    original = policy.model.generate
    monkeypatch.setattr(policy.model, "generate", lambda **how: given.append(how) or original(**how))
    prompts = PROMPTS[::-1]
    samples = draw(policy, n=2, prompts=prompts)
    fed = [row[mask.bool()].tolist() for row, mask in zip(given[0]["input_ids"], given[0]["attention_mask"])]
    for s in samples:
        assert s.completion.prompt_ids in fed and s.completion.prompt_ids == policy.prompt_ids(s.prompt)
        assert s.prompt in policy.tokenizer.decode(s.completion.prompt_ids)
    assert [s.prompt for s in samples[::2]] == prompts


def test_batches_keep_to_the_token_budget():
    """Padding counts: prompts of 40 and 5 with completions of 5 and 40 make rows of 80, not of 45."""
    sizes = [(20, 10), (5, 5), (40, 20), (40, 5), (5, 40), (5, 5), (200, 100)]
    batches = list(Policy._batches(sizes, 100))
    assert sorted(i for batch in batches for i in batch) == list(range(7)) and len(batches) < 7
    assert all(len(b) == 1 or (max(sizes[i][0] for i in b) + max(sizes[i][1] for i in b)) * len(b) <= 100 for b in batches)
    assert list(Policy._batches([], 100)) == []


def test_a_small_budget_gives_the_same_greedy_answers_in_more_calls(monkeypatch):
    answers, calls = [], []
    for batch_tokens in (1, 4096):
        policy = randomise(make(batch_tokens=batch_tokens)["solver"])
        original = policy.model.generate
        monkeypatch.setattr(policy.model, "generate", lambda **how: calls.append(batch_tokens) or original(**how))
        answers.append([c.text for group in policy.generate(PROMPTS * 2, 1, temperature=0) for c in group])
    assert answers[0] == answers[1] and calls == [1, 1, 1, 1, 4096]


def test_prompts_with_and_without_a_chat_template():
    with pytest.warns(UserWarning, match="no chat template"):
        plain = make(chat=False)["solver"]
    assert plain.tokenizer.decode(plain.prompt_ids("one and two")).startswith("one and two")
    chat = make()["solver"]
    assert chat.tokenizer.decode(chat.prompt_ids("one and two")) == "<user>one and two<assistant>"


def test_thinking_is_off_and_bos_is_written_once():
    policy = make()["solver"]
    policy.tokenizer.chat_template = ("<eos>{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<assistant>"
                                      "{% if enable_thinking is defined and enable_thinking is false %}stop{% endif %}")
    ids = policy.prompt_ids("one")
    assert policy.tokenizer.decode(ids) == "<eos><user>one<assistant>stop" and ids.count(policy.tokenizer.eos_token_id) == 1


def test_a_prompt_longer_than_the_context_loses_its_beginning_aloud():
    policy = make("gpt2", max_new_tokens=28)["solver"]      # learned positions: 128 in all
    with pytest.warns(UserWarning, match="lost its beginning"):
        ids = policy.prompt_ids("one two three " * 100)
    assert len(ids) == 100 and ids[-1] == policy.tokenizer.convert_tokens_to_ids("<assistant>")
    with pytest.warns(UserWarning):
        assert len(policy.generate(["one two three " * 100])[0][0].ids) > 0


# -- the update -------------------------------------------------------------------------------------------------------


def weights(policy):
    return [p.detach().clone() for p in policy.parameters]


def moved(policy, before):
    return any(not torch.equal(a, b) for a, b in zip(weights(policy), before))


def test_at_first_every_role_is_the_base_and_after_learning_it_is_not():
    policies = make()
    samples = draw(policies["solver"])
    base, _ = policies["solver"].logprobs(samples, reference=True)
    for policy in policies.values():
        assert torch.equal(policy.logprobs(samples)[0], base)
    policies["solver"].update(samples)
    assert not torch.equal(policies["solver"].logprobs(samples)[0], base)
    assert torch.equal(policies["verifier"].logprobs(samples)[0], base)


def test_an_update_touches_its_own_adapter_only():
    """Both adapters have their optimizer; a step on one, then on the other, moves both B matrices and never the base."""
    policies = make()
    solver, verifier = policies["solver"], policies["verifier"]
    base = {n: p.clone() for n, p in solver.model.named_parameters() if "lora_" not in n}
    samples, before = draw(solver), weights(verifier)
    solver.update(samples)
    assert not moved(verifier, before)
    before = weights(solver)
    verifier.update(samples)
    assert not moved(solver, before)
    for policy in (solver, verifier):
        assert len(policy.parameters) == len(list(solver.model.named_parameters())) // 2 - len(base) // 2
        assert all(p.abs().max() > 0 for n, p in solver.model.named_parameters() if f"lora_B.{policy.adapter}." in n)
    assert all(torch.equal(p, base[n]) and not p.requires_grad for n, p in solver.model.named_parameters() if n in base)


@pytest.mark.parametrize("sharing, names", [
    ("shared", ["shared", "shared"]), ("per-role", ["solver", "verifier"]), ("solver=x,verifier=x", ["x", "x"]), ({"solver": "left", "verifier": "right"}, ["left", "right"])])
def test_the_map_from_agents_to_policies(sharing, names):
    policies = make(sharing=sharing)
    assert [policies[a].adapter for a in ("solver", "verifier")] == names and len(distinct(policies)) == len(set(names))
    assert (policies["solver"] is policies["verifier"]) == (len(set(names)) == 1)


@pytest.mark.parametrize("name", ["0", "q_proj", "layers", "weight", "base_layer", "train", "keys", "default", "v1.0", "a b", ""])
def test_adapter_names_that_peft_would_confuse_are_refused(name):
    """An adapter "0" would also match the first layer, and lose its weights when saved."""
    with pytest.raises(ValueError, match="use a letter"):
        make(sharing={"solver": name, "verifier": "team"})


def test_a_token_limit_that_leaves_no_room_for_a_prompt_is_refused():
    with pytest.raises(ValueError, match="leaves no room for a prompt in a context of 128"):
        make("gpt2", max_new_tokens=128)


def test_numbered_agents_share_the_policy_of_their_role():
    policies = make(agents=("reasoner1", "reasoner2", "judge"))
    assert policies["reasoner1"] is policies["reasoner2"] is not policies["judge"] and policies["reasoner1"].adapter == role("reasoner1")


@FAMILIES
def test_the_first_ratio_is_one(family):
    """On-policy nothing is clipped, also with several epochs, whose old log-probabilities come from the same mode."""
    for epochs in (1, 3):
        policy = randomise(make(family)["solver"])
        metrics = policy.update(draw(policy), epochs=epochs)
        if epochs == 1:
            assert metrics["ratio_max"] == 1 and metrics["clip"] == 0
        else:
            assert metrics["ratio_max"] > 1.01


def test_old_log_probabilities_stay_those_of_the_sampling_policy(monkeypatch):
    import mas_rl
    seen = []
    original = mas_rl.policy_loss
    monkeypatch.setattr(mas_rl, "policy_loss", lambda logp, old, *rest, **how: seen.append((logp.detach().clone(), old)) or original(logp, old, *rest, **how))
    policy = randomise(make()["solver"])
    samples = draw(policy, prompts=PROMPTS[:1])         # prompts of one length, so that the update keeps their order
    at_sampling, _ = policy.logprobs(samples)
    policy.update(samples, epochs=3)
    (first, old1), (second, old2), (third, old3) = seen
    assert old1 is old2 is old3 and torch.equal(first, old1) and not torch.equal(second, old1) and not torch.equal(third, second)
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].completion.ids))
    torch.testing.assert_close(old1, at_sampling[order].detach() * policy._pad([samples[i].completion.ids for i in order], False)[1] +
                               old1 * (1 - policy._pad([samples[i].completion.ids for i in order], False)[1]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_micro_batches_do_not_change_the_gradient(aggregate):
    """Completions of 1 to 8 tokens as one batch of 8, several smaller ones, and one by one."""
    results = []
    for batch_tokens in (10_000, 60, 1):
        policy = randomise(make(batch_tokens=batch_tokens)["solver"])
        ids = [list(range(5, 6 + n)) for n in range(8)]
        samples = [Sample(0, n, "solver", 0, (), "", Completion([6] * (9 - n), x, "", True), True, 0, 0, True, advantage=n - 3.2) for n, x in enumerate(ids)]
        metrics = policy.update(samples, aggregate=aggregate, max_grad_norm=1e9)
        results.append((metrics["grad_norm"], metrics["entropy"], torch.cat([w.flatten() for w in weights(policy)])))
    for norm, entropy, w in results[1:]:
        assert norm == pytest.approx(results[0][0], rel=1e-5) and entropy == pytest.approx(results[0][1], rel=1e-5)
        torch.testing.assert_close(w, results[0][2], atol=1e-4, rtol=0)


def test_a_step_makes_the_good_half_likelier():
    policy = randomise(make(lr=1e-3)["solver"])
    samples = draw(policy, n=16)
    before = policy.logprobs(samples)[0].sum(1)
    policy.update(samples)
    gain = policy.logprobs(samples)[0].sum(1) - before
    good = torch.tensor([s.advantage > 0 for s in samples])
    assert gain[good].mean() > gain[~good].mean()


def test_only_tokens_of_the_completion_are_trained():
    """The gradient of the loss with respect to log-probabilities is 0 beyond a completion's end, and the sampled stop token has one."""
    policy = make()["solver"]
    eos = policy.tokenizer.eos_token_id
    short, long = Completion([7, 8], [5, eos], "", True), Completion([7], [5, 6, 7, 8], "", False)
    samples = [Sample(0, k, "solver", 0, (), "", c, True, 0, 0, True, advantage=1.0) for k, c in enumerate((short, long))]
    logp, mask = policy.logprobs(samples)
    logp.retain_grad()
    (-(logp * mask).sum() / mask.sum()).backward()
    assert logp.shape == (2, 4) and logp.grad.ne(0).tolist() == [[True, True, False, False], [True] * 4]


def test_no_samples_no_step_and_nothing_to_learn_no_step(monkeypatch):
    """Adam's momentum alone would move the weights: a batch without signal must not step."""
    policy = randomise(make()["solver"])
    samples = draw(policy)
    policy.update(samples)
    before = weights(policy)
    assert policy.update([]) == Policy.nothing and not moved(policy, before)
    for s in samples:
        s.advantage = 0.0
    monkeypatch.setattr(policy, "logprobs", None)       # without KL there is nothing to compute either
    assert policy.update(samples, epochs=2) == Policy.nothing | {"grad_norm": 0.0} and not moved(policy, before)


def test_kl_is_zero_at_the_start_and_pulls_back_later():
    policy = make()["solver"]
    samples = draw(policy)
    assert policy.update(samples, kl_coef=0.1)["kl"] == pytest.approx(0, abs=1e-9)
    randomise(policy)
    for s in samples:
        s.advantage = 0.0               # a silent group: the gradient is that of the KL alone
    values = [policy.update(samples, kl_coef=1.0)["kl"] for _ in range(5)]
    assert values[0] > 0 and values[-1] < values[0]
    assert policy.update(samples)["kl"] is None


def test_a_gradient_that_is_not_finite_is_not_applied():
    policy = randomise(make()["solver"])
    samples, before = draw(policy), weights(policy)
    samples[0].advantage = float("inf")
    assert policy.update(samples)["grad_norm"] != policy.update([])["grad_norm"] and not moved(policy, before)


def test_adapters_are_float32_on_a_bfloat16_base_and_alive():
    """At lr 1e-6 a bfloat16 weight of size 1e-2 would not change at all."""
    policies = make(lr=1e-6)
    model, tokenizer = policies["solver"].model.unload(), policies["solver"].tokenizer
    policy = load_policies((model.to(torch.bfloat16), tokenizer), ("solver",), lr=1e-6, max_new_tokens=8)["solver"]
    samples, before = draw(policy), weights(policy)
    assert {p.dtype for p in policy.parameters} == {torch.float32}
    policy.update(samples)
    assert moved(policy, before)
    logp, _ = policy.logprobs(samples)
    assert logp.dtype == torch.float32


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["per-role", "shared", "solver=a,verifier=lora"])
def test_adapters_are_saved_in_pefts_layout_and_load_again(tmp_path, sharing):
    policies = make(sharing=sharing)
    for policy in distinct(policies):
        randomise(policy)
    samples = draw(policies["solver"])
    expected = {p.adapter: p.logprobs(samples)[0].detach() for p in distinct(policies)}
    save_checkpoint(tmp_path / "step-000003", policies, 3)
    assert not list(tmp_path.glob("*.unfinished"))

    again = make(sharing=sharing)
    assert load_checkpoint(tmp_path / "step-000003", again) == 3
    for policy in distinct(again):
        torch.testing.assert_close(policy.logprobs(samples)[0], expected[policy.adapter], atol=1e-6, rtol=0)
        alone = PeftModel.from_pretrained(make()["solver"].model.unload(), tmp_path / "step-000003" / policy.adapter)
        stranger = Policy(alone, policy.tokenizer, "default", max_new_tokens=12)
        torch.testing.assert_close(stranger.logprobs(samples)[0], expected[policy.adapter], atol=1e-6, rtol=0)
    assert json.loads((tmp_path / "step-000003" / "step.json").read_text()) == {"step": 3}
    with pytest.raises(FileNotFoundError, match="has no adapter other"):
        load_checkpoint(tmp_path / "step-000003", make(sharing={"solver": "other", "verifier": "other"}))
