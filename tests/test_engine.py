"""The engine against `model.generate`, against the trainer, and against itself under another schedule."""

import pytest
import torch
import transformers
from conftest import make_lm

from lld.engine import sampling
from lld.engine.decoder import SlotCache, grown, linear
from lld.engine.engine import Engine
from lld.engine.graphs import DecodeGraphs, bucket
from lld.engine.sampling import sample_tokens
from lld.model.joined import join_weights, joined, neighbours
from lld.policy import Policy
from lld.protocol import STOP_STRINGS


def new_engine(lm, tokenizer, **options):
    defaults = dict(
        num_slots=8, temperature=1.0, top_p=1.0, stop_strings=STOP_STRINGS, eos_ids=(tokenizer.eos_token_id,)
    )
    return Engine(lm, tokenizer, **(defaults | options))


def run(engine, turns: int = 1, observation=(5, 6, 7), max_new_tokens: int = 20, parked_steps: int = 0):
    """Lets every sequence speak `turns` times with an observation between; returns all tokens,
    log-probabilities and masks by key.

    An observation comes `parked_steps` steps after it was asked for, as from a slow search.
    """
    tokens, logprobs, reasons, spoken, due = {}, {}, {}, {}, {}
    while engine.busy or due:
        for key in [key for key, steps in due.items() if steps == 0 or not engine.busy]:
            del due[key]
            engine.extend(key, list(observation), max_new_tokens)
        due = {key: steps - 1 for key, steps in due.items()}
        for stopped in engine.step():
            key = stopped.key
            tokens.setdefault(key, []).extend(stopped.token_ids)
            logprobs.setdefault(key, []).extend(stopped.logprobs)
            reasons.setdefault(key, []).append(stopped.reason)
            spoken[key] = spoken.get(key, 0) + 1
            if spoken[key] == turns:
                engine.release(key)
            else:
                tokens[key] += list(observation)
                logprobs[key] += [None] * len(observation)
                due[key] = parked_steps
    return tokens, logprobs, reasons


PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 80, 90], [11] * 70, [12, 13]]


def test_greedy_turns_equal_reprefill_with_generate(lm, tokenizer, monkeypatch):
    """KV kept across turns, shared prompts, ragged passes, a cache that grows: nothing may change a token."""
    monkeypatch.setattr("lld.engine.decoder.LENGTH_BUCKET", 16)
    engine = new_engine(lm, tokenizer, temperature=0, num_slots=3)
    for key, prompt in enumerate(PROMPTS):
        engine.add(key, prompt, [0], 15)
    tokens, _, _ = run(engine, turns=3, max_new_tokens=15)
    for key, prompt in enumerate(PROMPTS):
        context = list(prompt)
        for turn in range(3):
            generated = lm.generate(
                torch.tensor([context]),
                max_new_tokens=15,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=0,
            )[0].tolist()
            spoken = generated[len(context) :]
            # Generate knows no stop strings: cut where one first appears
            for end in range(1, len(spoken) + 1):
                if any(stop in tokenizer.decode(spoken[:end]) for stop in STOP_STRINGS):
                    spoken = spoken[:end]
                    break
            context += spoken + ([5, 6, 7] if turn < 2 else [])
        assert tokens[key, 0] == context[len(prompt) :]


def test_recorded_logprobs_are_the_trainers(lm, tokenizer):
    engine = new_engine(lm, tokenizer, temperature=0.7)
    for key, prompt in enumerate(PROMPTS):
        engine.add(key, prompt, [1, 2, 3], 20)
    tokens, logprobs, _ = run(engine, turns=3)
    assert len(tokens) == 12
    for (key, sample), ids in tokens.items():
        row = torch.tensor([PROMPTS[key] + ids])
        scored = torch.zeros_like(row, dtype=torch.bool)
        recorded = logprobs[key, sample]
        scored[0, len(PROMPTS[key]) :] = torch.tensor([p is not None for p in recorded])
        with torch.no_grad():
            trainer, _ = Policy(lm)(row, scored, temperature=0.7)
        gap = max(
            abs(p - t)
            for p, t in zip(recorded, trainer[0, len(PROMPTS[key]) :].tolist(), strict=True)
            if p is not None
        )
        assert gap < 1e-4


def test_a_seed_gives_the_same_tokens_whatever_the_slots(lm, tokenizer, monkeypatch):
    outcomes = []
    # Rows that find no room in a pass are read in the next
    for num_slots, pass_tokens in ((2, 16384), (5, 40), (32, 80)):
        monkeypatch.setattr("lld.engine.engine.PASS_TOKENS", pass_tokens)
        engine = new_engine(lm, tokenizer, num_slots=num_slots)
        for key, prompt in enumerate(PROMPTS):
            engine.add(key, prompt, [10 * key + s for s in range(3)], 12)
        outcomes.append(run(engine, turns=2, max_new_tokens=12)[0])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    engine = new_engine(lm, tokenizer)
    engine.add(0, PROMPTS[0], [999], 12)
    assert run(engine)[0][0, 0] != outcomes[0][0, 0]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_a_decoder_run_layer_by_layer_is_transformers_own(kind, tokenizer):
    """Direct passes skip most of the last layer and use other operations: same tokens, log-probabilities to
    rounding."""
    torch.manual_seed(0)
    options = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
    )
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = getattr(transformers, f"{kind}Config")(**options, rope_parameters=rope)
    lm = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # as made, norms and biases are ones and zeros, and a model without them would pass
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    outcomes = []
    for direct in (True, False):
        engine = new_engine(lm, tokenizer, num_slots=5)
        assert engine.decoder.direct
        if not direct:
            engine.decoder.direct = False
            lm.set_attn_implementation("lld")
        for key, prompt in enumerate(PROMPTS):
            engine.add(key, prompt, [10 * key + s for s in range(3)], 12)
        outcomes.append(run(engine, turns=2, max_new_tokens=12))
    assert outcomes[0][0] == outcomes[1][0]
    gaps = [
        abs(a - b)
        for key, kept in outcomes[0][1].items()
        for a, b in zip(kept, outcomes[1][1][key], strict=True)
        if a is not None
    ]
    assert len(gaps) > 200 and max(gaps) < 1e-4


def test_other_decoders_go_through_their_own_forward(tokenizer):
    torch.manual_seed(0)
    options = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lm = transformers.MistralForCausalLM(transformers.MistralConfig(**options, sliding_window=None)).eval()
    engine = new_engine(lm, tokenizer, temperature=0, eos_ids=())
    assert not engine.decoder.direct
    engine.add(0, PROMPTS[1], [0], 10)
    tokens, _, _ = run(engine, turns=2, max_new_tokens=10)
    for cut in (0, 13):  # the first turn, and the second after an observation of three tokens
        context = PROMPTS[1] + tokens[0, 0][:cut]
        assert (
            lm.generate(torch.tensor([context]), max_new_tokens=10, do_sample=False, pad_token_id=0)[
                0, len(context) :
            ].tolist()
            == tokens[0, 0][cut : cut + 10]
        )


def test_a_turn_resumes_where_it_stopped_inside_a_token(tokenizer):
    """A stop string may end inside a token: the token is kept whole and what follows it is read on."""
    token = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("x</search>\n"))
    stop = [
        i
        for i in range(len(tokenizer))
        if ">" in tokenizer.decode([i]) and not tokenizer.decode([i]).startswith(">")
    ]
    assert stop, "the tokenizer of this test must have a token that ends a tag without being one"
    lm = make_lm(tokenizer, seed=3)
    engine = new_engine(lm, tokenizer, eos_ids=())
    script = iter(token + [99] * 50)
    sequences = []
    engine._sample_original = engine._sample

    def forced(rows, *_):
        sequences.extend(rows)
        for row in rows:
            token_id = next(script)
            row.turn.token_ids.append(token_id)
            row.turn.logprobs.append(0.0)
            row.unread = [token_id]
        from lld.engine.engine import PARKED

        out = []
        for row in rows:
            if reason := engine._stop_reason(row, row.turn.token_ids[-1]):
                row.state, row.turn.reason = PARKED, reason
                out.append(row.turn)
        return out

    engine._sample = forced
    engine.add(0, [1, 2], [0], 40)
    stopped = []
    while not stopped:
        stopped = engine.step()
    text = tokenizer.decode(stopped[0].token_ids)
    assert stopped[0].reason == "stop_string" and "</search>" in text
    assert not any(s in tokenizer.decode(stopped[0].token_ids[:-1]) for s in STOP_STRINGS)


def test_eos_is_kept_and_the_budget_ends_a_turn(tokenizer):
    lm = make_lm(tokenizer, seed=5)
    with torch.no_grad():
        lm.lm_head.weight.zero_()  # uniform: EOS comes up after a while
    engine = new_engine(lm, tokenizer, num_slots=64, eos_ids=(7, 8, 9, 11, 12, 13, 14, 15))
    engine.add(0, [1, 2, 3], list(range(64)), 60)
    tokens, logprobs, reasons = run(engine)
    ends = {key: ids[-1] for key, ids in tokens.items() if reasons[key] == ["eos"]}
    assert ends and all(end in engine.eos_ids for end in ends.values())
    assert any(r == ["length"] for r in reasons.values()) and all(
        len(tokens[k]) == 60 for k, r in reasons.items() if r == ["length"]
    )
    assert all(
        abs(p + torch.log(torch.tensor(float(len(tokenizer))))) < 1e-5 for ps in logprobs.values() for p in ps
    )


def test_sampling_frequencies_are_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf, -1.0]])
    uniforms = (torch.arange(20000) + 0.5).div(20000).double()
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8)):
        token, logprob = map(
            torch.tensor,
            zip(*sample_tokens(logits.expand(20000, -1), uniforms, temperature, top_p), strict=True),
        )
        wanted = (logits[0] / temperature).softmax(-1)
        if top_p < 1:  # by hand: .644, .237 -> .881 reaches .8 with two tokens
            wanted = torch.tensor([0.0, 0.2689, 0.7311, 0.0, 0.0])
        counts = torch.bincount(token, minlength=5) / 20000
        torch.testing.assert_close(counts, wanted, atol=2e-4, rtol=0)
        torch.testing.assert_close(logprob.exp(), wanted[token], atol=1e-4, rtol=0)


def test_a_long_vocabulary_is_searched_in_blocks():
    """The same token as a running sum over all, top-p by sorting few or all, log-probabilities of the very
    distribution."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 5000, generator=generator) * torch.linspace(0.1, 5, 200)[:, None]
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    for top_p in (1.0, 0.5, 0.999):
        token, logprob = map(torch.tensor, zip(*sample_tokens(logits, uniforms, 1.0, top_p), strict=True))
        probs = logits.double().softmax(-1)
        if top_p < 1:
            ranked, order = probs.sort(descending=True)
            probs = torch.zeros_like(probs).scatter(
                -1, order, ranked.masked_fill(ranked.cumsum(-1) - ranked >= top_p, 0)
            )
            probs /= probs.sum(-1, keepdim=True)
        cdf = probs.cumsum(-1)
        assert (token == (cdf <= uniforms[:, None]).sum(-1)).all()
        torch.testing.assert_close(
            logprob.double(), probs.gather(1, token[:, None])[:, 0].log(), atol=1e-5, rtol=0
        )


def test_edges_of_the_unit_interval_never_pick_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    for uniform in (0.0, 1 - 2**-53, 1.0):
        ((token, logprob),) = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), 1.0, 1.0)
        assert token in (1, 2) and logprob == pytest.approx(-0.6931, abs=1e-4)


def test_each_prompt_is_prefilled_once_and_each_token_read_once(lm, tokenizer):
    engine = new_engine(lm, tokenizer, num_slots=16)
    engine.add(0, PROMPTS[2], list(range(5)), 10)
    tokens, _, _ = run(engine, turns=3, max_new_tokens=10)
    # Every token but each sequence's last is fed exactly once; the prompt once for all five.
    assert engine.num_fed == len(PROMPTS[2]) + sum(len(ids) - 1 for ids in tokens.values())


def test_sliding_window_models_are_refused(tokenizer):
    lm = make_lm(tokenizer)
    lm.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding_attention"):
        new_engine(lm, tokenizer)


def test_steps_of_fixed_shapes_are_the_same_steps(tokenizer):
    """What CUDA graphs replay, with a capture that computes anew: rows that fill a step up leave no trace,
    also where the cache grows and slots change hands."""
    lm, replays = make_lm(tokenizer), []

    def capture(forward, pool):
        result = forward().clone()

        def replay():
            replays.append(len(result))
            result.copy_(forward())

        return replay, result

    played = []
    for fixed in (False, True):
        engine = new_engine(lm, tokenizer, num_slots=7, stop_strings=())
        if fixed:
            engine.graphs = DecodeGraphs(lm, engine.decoder, engine.cache, capture)
        for number, prompt in enumerate(PROMPTS):
            engine.add(number, prompt, [number, number + 10, number + 20], 100)
        played.append(run(engine, turns=3, observation=range(5, 12), max_new_tokens=60, parked_steps=9))
    assert max(map(len, played[0][0].values())) > 200 and engine.cache.keys_values.shape[3] > 256  # it grew
    assert {len(tokens) for tokens in played[0][0].values()} != {max(map(len, played[0][0].values()))}
    assert played[0][0] == played[1][0] and played[0][2] == played[1][2]
    for key, logprobs in played[0][1].items():
        assert [x is None for x in logprobs] == [x is None for x in played[1][1][key]]
        assert [x for x in played[1][1][key] if x is not None] == pytest.approx(
            [x for x in logprobs if x is not None], abs=1e-5
        )
    assert len(replays) > 100 and set(replays) <= {1, 2, 4, 7} and len(set(replays)) > 1


def test_steps_are_filled_up_to_few_shapes():
    assert [bucket(rows, 200) for rows in (1, 3, 9, 25, 97, 129, 193, 200)] == [
        1,
        4,
        16,
        32,
        128,
        192,
        200,
        200,
    ]
    assert bucket(100, 100) == 100


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_and_large_weights_are_multiplied_slice_by_slice(bias, monkeypatch):
    products, mm = [], torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *args, **kwargs: products.append(args[1].shape) or mm(*args, **kwargs)
    )
    torch.manual_seed(0)
    module = torch.nn.Linear(1000, 4500, bias=bias)
    with torch.inference_mode():
        for rows in (1, 2, 128, 129):
            x_NC = torch.randn(rows, 1000)
            products.clear()
            torch.testing.assert_close(linear(x_NC, module), module(x_NC), rtol=1e-5, atol=1e-5)
            assert (len(products) > 1) == (rows in (2, 128)) and sum(shape[1] for shape in products) in (
                0,
                4500,
            )


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_joined_weights_give_the_same_tokens_and_stay_parameters(kind, tokenizer):
    torch.manual_seed(0)
    options = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=24)
    config = getattr(transformers, f"{kind}Config")(**options, **heads)
    lm = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    names, outcomes = list(lm.state_dict()), []
    for join in (False, True):
        if join:
            join_weights(lm)
        engine = new_engine(lm, tokenizer, num_slots=5)
        assert all((pair is not None) == join for pair in engine.decoder.qkv + engine.decoder.gate_up)
        for key, prompt in enumerate(PROMPTS):
            engine.add(key, prompt, [10 * key + s for s in range(3)], 12)
        outcomes.append(run(engine, turns=2, max_new_tokens=12))
    assert outcomes[0][0] == outcomes[1][0] and list(lm.state_dict()) == names
    layer = lm.base_model.layers[1]
    weight, _ = joined(neighbours(layer)[0])
    with torch.no_grad():
        layer.self_attn.k_proj.weight.fill_(3.0)  # as sharding.refresh writes
    assert (weight[96:144] == 3).all() and not (weight[:96] == 3).any()


def test_a_cache_grows_no_further_than_the_longest_sequence(lm):
    cache, sizes = SlotCache(lm.config, 1, "cpu", torch.float32, max_tokens=4096), []
    for length in range(1, 4097):
        cache.reserve(length)
        sizes += [cache.room] * (cache.room not in sizes)
    assert sizes == [256, 512, 768, 1280, 2048, 3072, 4096]
    assert grown(3072, 3073) == 4608 and grown(3072, 5000, 4096) == 5120  # unknown, and exceeded


@pytest.mark.parametrize("vocabulary", [100, 574, 3000])
def test_a_row_is_cut_alike_whatever_was_sorted_first_and_whoever_is_beside_it(monkeypatch, vocabulary):
    generator = torch.Generator().manual_seed(0)
    # From near-deterministic rows to flat ones, whose nucleus no sorted part holds.
    logits = torch.randn(40, vocabulary, generator=generator) * torch.linspace(6, 0.01, 40)[:, None]
    uniforms = torch.rand(40, dtype=torch.float64, generator=generator)
    drawn = sample_tokens(logits, uniforms, 1.0, 0.9, keep_ids=True)
    assert min(len(ids) for _, _, ids in drawn) < 20 and (
        max(len(ids) for _, _, ids in drawn) > 0.8 * vocabulary
    )
    alone = [
        sample_tokens(logits[i : i + 1], uniforms[i : i + 1], 1.0, 0.9, keep_ids=True)[0] for i in range(40)
    ]
    monkeypatch.setattr(sampling, "FEW", 10**6)  # everything at once
    whole = sample_tokens(logits, uniforms, 1.0, 0.9, keep_ids=True)
    for one, *others in zip(drawn, alone, whole, strict=True):
        for other in others:
            assert one[:2] == other[:2] and torch.equal(one[2], other[2])
    assert [row[:2] for row in drawn] == sample_tokens(logits, uniforms, 1.0, 0.9)


def test_the_search_ends_at_the_last_token_with_a_probability():
    """Sums of a block and of its tokens one by one round differently: what is left after them must not be
    drawn."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 2000, generator=generator) * 3
    logits[:, 700:] = -torch.inf
    for uniform in (0.0, 1 - 2**-53, 1.0):
        drawn = sample_tokens(logits, torch.full((64,), uniform, dtype=torch.float64), 1.0, 1.0)
        assert all(token < 700 and logprob > -30 for token, logprob in drawn)
    ((token, logprob),) = sample_tokens(torch.full((1, 2000), torch.nan), torch.tensor([0.5]), 1.0, 1.0)
    assert 0 <= token < 2000 and logprob != logprob  # a broken model is told by its log-probabilities


def test_under_autocast_the_cache_is_half_and_what_is_of_one_type_stays_so(tokenizer):
    kept = []
    cases = [(dtype, cast) for dtype in (torch.float32, torch.bfloat16) for cast in (False, True)]
    for dtype, cast in cases:
        lm = make_lm(tokenizer, scale=1.0).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            engine = new_engine(lm, tokenizer, temperature=0, eos_ids=(), stop_strings=())
            for key, prompt in enumerate(PROMPTS):
                engine.add(key, prompt, [0], 6)
            kept.append(run(engine, turns=2, max_new_tokens=6)[:2])
        assert engine.cache.keys_values.dtype == (torch.bfloat16 if cast else dtype)
    exact, cast, half, half_cast = kept
    assert half == half_cast
    for other in (cast, half):
        assert max(abs(other[1][key][0] - exact[1][key][0]) for key in exact[1]) < 0.05  # of the first tokens
