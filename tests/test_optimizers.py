"""The optimizers that make one GPU enough: what they compute, what they keep where, and that they resume."""

import copy
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import make_lm

from lld import settings
from lld.config import Optim
from lld.policy import Policy
from lld.running import optimizers, setup

IDS_BT = torch.arange(60).view(2, 30)
SCORED_BT = IDS_BT % 30 > 0  # the first token has nothing to be predicted from


def steps(policy, optimizer, num_steps: int, clip: float = 1.0):
    for _ in range(num_steps):
        logprobs_BT, _ = policy(IDS_BT, SCORED_BT)
        (-logprobs_BT.mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in policy.parameters()]


def make(tokenizer, name: str, dtype=torch.float32, lr: float = 1e-3):
    policy = Policy(make_lm(tokenizer, scale=1.0))
    optimizer = optimizers.make(policy, Optim(name=name), dtype)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return policy, optimizer


def test_offloaded_adamw_is_torchs_bit_for_bit_and_clips(tokenizer):
    for clip in (1.0, 0.01):
        policy, _ = make(tokenizer, "adamw")
        options = Optim()
        expected = steps(
            policy,
            torch.optim.AdamW(
                policy.parameters(),
                lr=1e-3,
                betas=options.betas,
                weight_decay=options.weight_decay,
                fused=True,
            ),
            3,
            clip,
        )
        for a, b in zip(expected, steps(*make(tokenizer, "adamw_offload"), 3, clip), strict=True):
            assert torch.equal(a, b)


def test_in_bf16_the_cpu_keeps_float32_weights_and_gradients_are_summed_in_float32(tokenizer):
    policy, optimizer = make(tokenizer, "adamw_offload", torch.bfloat16, lr=1e-6)
    # Most embeddings have no gradient
    layers = [index for index, (name, _) in enumerate(policy.named_parameters()) if "proj.weight" in name]
    start = [master.detach().clone() for master in optimizer.masters]
    before = [weight.detach().clone() for weight in policy.parameters()]
    policy(IDS_BT, SCORED_BT)[0].mean().backward()
    assert {weight.grad.dtype for weight in policy.parameters()} == {torch.float32}
    optimizer.zero_grad()
    after = steps(policy, optimizer, 3)
    assert {weight.dtype for weight in after} == {torch.bfloat16}
    moved = torch.cat([(optimizer.masters[i] != start[i]).flatten() for i in layers]).float().mean()
    rounded = torch.cat([(after[i] != before[i]).flatten() for i in layers]).float().mean()
    assert moved > 0.9 and rounded < moved / 2  # steps of 1e-6 are kept, though bf16 shows few of them
    assert all(
        torch.equal(weight, master.bfloat16())
        for weight, master in zip(policy.parameters(), optimizer.masters, strict=True)
    )


def test_a_sampler_in_bf16_where_it_is_so_anyway_is_refused(monkeypatch):
    """On a GPU, that is; else mixed precision is off."""
    monkeypatch.setattr(setup, "Accelerator", lambda **_: SimpleNamespace(mixed_precision="bf16"))
    with pytest.raises(ValueError, match="rollout.weights = 'bf16' does nothing with model.mixed_precision"):
        setup.open_accelerator(settings.with_overrides({}, ["rollout.weights=bf16"]))


def test_moving_moments_that_stay_in_cpu_memory_is_refused():
    with pytest.raises(ValueError, match="cpu_in_rollout = True does nothing with optim.name = 'adamw_offlo"):
        settings.with_overrides({}, ["optim.name=adamw_offload", "optim.cpu_in_rollout=true"])


@pytest.mark.parametrize("name, dtype", [("adamw_offload", torch.bfloat16), ("adamw_8bit", torch.float32)])
def test_the_state_saved_with_weights_only_resumes_bit_for_bit(name, dtype, tokenizer, tmp_path):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    policy, optimizer = make(tokenizer, name, dtype)
    steps(policy, optimizer, 2)
    torch.save({"optimizer": optimizer.state_dict(), "lm": policy.lm.state_dict()}, tmp_path / "state.pt")
    whole = steps(policy, optimizer, 2)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    policy, optimizer = make(tokenizer, name, dtype)
    policy.lm.load_state_dict(saved["lm"])
    optimizer.load_state_dict(saved["optimizer"])
    for a, b in zip(whole, steps(policy, optimizer, 2), strict=True):
        assert torch.equal(a, b)


def test_a_state_saved_before_the_first_step_resumes_too(tokenizer):
    policy, optimizer = make(tokenizer, "adamw_offload", torch.bfloat16)
    state = copy.deepcopy(optimizer.state_dict())
    whole = steps(policy, optimizer, 2)
    policy, optimizer = make(tokenizer, "adamw_offload", torch.bfloat16)
    optimizer.load_state_dict(state)
    for a, b in zip(whole, steps(policy, optimizer, 2), strict=True):
        assert torch.equal(a, b)


def test_8_bit_moments_take_a_quarter_and_follow_adamw(tokenizer):
    pytest.importorskip("bitsandbytes")
    policy, optimizer = make(tokenizer, "adamw_8bit")
    for weight, expected in zip(
        steps(policy, optimizer, 3), steps(*make(tokenizer, "adamw"), 3), strict=True
    ):
        assert (weight - expected).abs().max() < 3e-3  # three steps of 1e-3, each at most about that far
    head = policy.lm.lm_head.weight
    state = optimizer.state[head]
    assert (
        state["state1"].dtype == state["state2"].dtype == torch.uint8
        and state["state1"].numel() == head.numel()
    )


def test_without_bitsandbytes_the_remedy_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(
        ValueError,
        match="needs bitsandbytes: pip install -r requirements-8bit.txt, or use adamw or adamw_offload",
    ):
        make(tokenizer, "adamw_8bit")


def test_accelerate_leaves_the_offloaded_state_where_it_is(tokenizer):
    from accelerate import Accelerator

    expected = steps(*make(tokenizer, "adamw_offload", torch.bfloat16), 2)
    policy, optimizer = make(tokenizer, "adamw_offload", torch.bfloat16, lr=0.0)
    policy, optimizer = Accelerator(cpu=True).prepare(policy, optimizer, device_placement=[True, False])
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for a, b in zip(expected, steps(policy, optimizer, 2), strict=True):
        assert torch.equal(a, b)


def test_only_offloaded_adamw_takes_every_cpu_core(monkeypatch):
    """`accelerate launch` asks for one thread, and the offloaded step is work of the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        setup, "Accelerator", lambda **_: SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    )
    monkeypatch.setattr(setup, "set_seed", lambda seed: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for name, threads in (("adamw", []), ("adamw_offload", [12])):
        asked.clear()
        setup.open_accelerator(settings.from_dict({"optim": {"name": name}}))
        assert asked == threads
