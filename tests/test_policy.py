"""Log-probability, entropy and their gradients, slice by slice over the vocabulary, are those of the full
logits."""

import math

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lld import policy
from lld.engine.decoder import head_logits
from lld.model import lm_head
from lld.model.lm_head import token_scores


def naive_scores(hidden_NC, head, targets_N, temperature, entropy_gradient):
    logp_NV = (head(hidden_NC) / temperature).log_softmax(-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    return logp_NV.gather(1, targets_N[:, None])[:, 0], entropy_N if entropy_gradient else entropy_N.detach()


def scores_and_gradients(score, dtype, temperature, entropy_gradient, bias, num_tokens=37):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    head = torch.nn.Linear(24, 3001, bias=bias, dtype=dtype)
    for parameter in head.parameters():
        parameter.data = draw(*parameter.shape)
    hidden_NC = draw(num_tokens, 24).requires_grad_()
    targets_N = torch.randint(0, 3001, (num_tokens,), generator=generator)
    targets_N[:3] = torch.tensor([0, 1024, 3000])[:num_tokens]  # at the edges of the slices
    logprob_N, entropy_N = score(hidden_NC, head, targets_N, temperature, entropy_gradient)
    assert entropy_N.requires_grad == entropy_gradient
    ((logprob_N * draw(num_tokens)).sum() + (entropy_N * draw(num_tokens)).sum()).backward()
    return logprob_N, entropy_N, hidden_NC.grad, *(parameter.grad for parameter in head.parameters())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_slices_give_the_numbers_of_the_full_logits(temperature, entropy_gradient, bias, monkeypatch):
    """Three slices of 1,024, an online softmax over them, and a backward pass by hand."""
    monkeypatch.setattr(lm_head, "SLICE_LOGITS", {"cpu": 1})
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        ours, naive = (
            scores_and_gradients(score, dtype, temperature, entropy_gradient, bias)
            for score in (token_scores, naive_scores)
        )
        for one, other in zip(ours, naive, strict=True):
            assert (
                one.dtype == dtype
                and float((one - other).detach().norm() / other.detach().norm()) < tolerance
            )


def test_logits_far_apart_neither_overflow_nor_lose_the_target(monkeypatch):
    """The largest logit comes in the last slice: what was summed before it shrinks to nothing, exactly."""
    monkeypatch.setattr(lm_head, "SLICE_LOGITS", {"cpu": 1})
    head = torch.nn.Linear(1, 3000, bias=False)
    head.weight.data = torch.arange(3000.0)[:, None]
    logprob_N, entropy_N = token_scores(torch.ones(3, 1), head, torch.tensor([2999, 2998, 0]), 1.0, False)
    normalizer = -math.log(1 - math.exp(-1))  # a geometric series
    assert logprob_N.tolist() == pytest.approx([-normalizer, -normalizer - 1, -normalizer - 2999])
    assert entropy_N.tolist() == pytest.approx([normalizer + 1 / (math.e - 1)] * 3)


def test_a_micro_batch_without_tokens_has_a_gradient_of_zero():
    _, _, hidden_grad_NC, weight_grad_VC = scores_and_gradients(
        token_scores, torch.float32, 1.0, True, False, num_tokens=0
    )
    assert hidden_grad_NC.shape == (0, 24) and weight_grad_VC.shape == (3001, 24) and not weight_grad_VC.any()


def tied_model(pad_token_id=None):
    torch.manual_seed(0)
    options = Qwen2Config(
        vocab_size=500,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=pad_token_id,
    )
    token_ids_BT = torch.randint(0, 500, (3, 20))
    token_ids_BT[0, 3:9] = 7
    scored_BT = torch.zeros(3, 20, dtype=torch.bool)
    scored_BT[:, 5:] = True
    return Qwen2ForCausalLM(options), token_ids_BT, scored_BT


@pytest.mark.parametrize("pad_token_id", [None, 7])
@pytest.mark.parametrize("half", [False, True])
def test_tied_weights_have_the_whole_gradient(half, pad_token_id):
    """The head's part and the embedding's, which leaves out the padding token; checked against the model's
    own logits, over two micro-batches."""
    lm, token_ids_BT, scored_BT = tied_model(pad_token_id)
    weight, gradients = lm.get_input_embeddings().weight, []
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        for ours in (True, False):
            weight.grad = None
            for rows in (slice(0, 1), slice(1, 3)):
                if ours:
                    logprob_BT = policy.Policy(lm)(token_ids_BT[rows], scored_BT[rows])[0]
                else:
                    logp_BTV = lm(token_ids_BT[rows]).logits[:, :-1].float().log_softmax(-1)
                    logprob_BT = logp_BTV.gather(-1, token_ids_BT[rows][:, 1:, None])[:, 4:]
                logprob_BT.sum().backward()
            gradients.append(weight.grad)
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < (1e-2 if half else 1e-6)
    assert float(gradients[0][7].norm()) > 0  # the head's part of the padding token is there


def test_tied_weights_have_one_gradient_in_memory():
    """Of all that a backward pass allocates, one block alone is as large as the weights; autograd by itself
    makes two, and is left to it in half precision."""
    found = []
    for tied, dtype in ((True, torch.float32), (False, torch.float32), (True, torch.bfloat16)):
        lm, token_ids_BT, scored_BT = tied_model()
        size = lm.to(dtype).get_input_embeddings().weight.nbytes
        if not tied:
            lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().clone())
        value = policy.Policy(lm)(token_ids_BT, scored_BT)[0].sum()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiled:
            value.backward()
        found.append(
            sum(
                event.nbytes() == size
                for event in profiled.profiler.kineto_results.events()
                if event.name() == "[memory]"
            )
        )
    assert found == [1, 2, 2]


def test_logits_computed_in_bfloat16_are_summed_in_float32():
    with torch.autocast("cpu", torch.bfloat16):
        ours = scores_and_gradients(token_scores, torch.float32, 1.0, False, False)
        with torch.autocast("cpu", enabled=False):

            def wide(head):
                return lambda x: x.bfloat16().float() @ head.weight.bfloat16().float().T

            naive = scores_and_gradients(
                lambda h, head, *rest: naive_scores(h, wide(head), *rest), torch.float32, 1.0, False, False
            )
    assert ours[0].dtype == ours[1].dtype == torch.float32
    assert all(
        float((one - other).detach().norm() / other.detach().norm()) < 1e-2
        for one, other in zip(ours, naive, strict=True)
    )
    assert float((ours[0] - naive[0]).detach().abs().max()) < 1e-5


def large_logits(num_tokens=64, num_ids=5000, width=64):
    """bf16 states and weights whose likeliest logits lie near 20, as a real vocabulary's do; exact
    log-probabilities of some tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden_NC, weight_VC = (
        torch.randn(n, width, generator=generator).bfloat16() for n in (num_tokens, num_ids)
    )
    hidden_NC *= 0.7
    logp_NV = (hidden_NC.double() @ weight_VC.double().T).log_softmax(-1)
    targets_N = logp_NV.argmax(-1)
    return hidden_NC, weight_VC, targets_N, logp_NV


def test_logits_of_half_precision_are_never_rounded_to_it():
    """Rounded to bf16 a logit near 20 is off by up to .06; both the trainer's slices and the engine's logits
    are those of float64 to 1e-4."""
    hidden_NC, weight_VC, targets_N, logp_NV = large_logits()
    exact_N = logp_NV.gather(1, targets_N[:, None])[:, 0]
    head = torch.nn.Linear(*weight_VC.T.shape, bias=False, dtype=torch.bfloat16)
    head.weight.data = weight_VC
    rounded_NV = head(hidden_NC).detach().double()
    assert (
        float(rounded_NV.amax()) > 20
        and float((rounded_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0] - exact_N).abs().max())
        > 0.02
    )
    # Weights in bf16 as sharded or offloaded ones are, or float32 ones under autocast
    for autocast in (False, True):
        head.weight.data = weight_VC.float() if autocast else weight_VC
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            trainer_N, _ = token_scores(hidden_NC, head, targets_N, 1.0, False)
            sampler_NV = head_logits(hidden_NC.to(head.weight.dtype), head)
        assert sampler_NV.dtype == trainer_N.dtype == torch.float32
        assert float((trainer_N - exact_N).abs().max()) < 1e-4
        assert float((sampler_NV.double().log_softmax(-1) - logp_NV).abs().max()) < 1e-4


def test_the_backward_pass_sees_the_logits_of_the_forward_pass():
    """Probabilities made of rounded logits add up to 1.02 or .98 and not to 1: then the gradient of a shift
    of all logits is not 0."""
    hidden_NC, weight_VC, targets_N, logp_NV = large_logits()
    head = torch.nn.Linear(*weight_VC.T.shape, bias=False, dtype=torch.bfloat16)
    head.weight.data = weight_VC
    logprob_N, _ = token_scores(hidden_NC.requires_grad_(), head, targets_N, 1.0, False)
    logprob_N.sum().backward()
    error_NV = torch.nn.functional.one_hot(targets_N, len(weight_VC)) - logp_NV.exp()
    exact_NC = error_NV @ weight_VC.double()
    assert float((hidden_NC.grad - exact_NC).norm() / exact_NC.norm()) < 0.01


@pytest.mark.parametrize("bias", [False, True])
def test_the_engines_logits_are_the_models_own_where_nothing_is_half(bias):
    head = torch.nn.Linear(8, 30, bias=bias)
    hidden_NC = torch.randn(5, 8)
    with torch.no_grad():
        assert torch.equal(head_logits(hidden_NC, head), head(hidden_NC))
        half = head.to(torch.bfloat16)
        assert torch.allclose(
            head_logits(hidden_NC.bfloat16(), half),
            half.double()(hidden_NC.bfloat16().double()).float(),
            atol=1e-5,
        )
