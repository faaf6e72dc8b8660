"""A run that trains LoRA adapters: its models, and what stands for a reference and an anchor.

The weights of the model are frozen, in the type of the computations (bf16 on a GPU, which is what most models
are published in; float32 on a CPU), the adapters in float32. There is one model in memory, and a copy for the
engine with the adapters merged into it, which shares the weights that have no adapter. The reference is the
policy without its adapters, an anchor the policy with older ones. None of them drops anything out, so two
passes of the same adapters over the same micro-batch are the same numbers.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from lld.config import Config
from lld.engine.fit import check_fit
from lld.model import adapters
from lld.model.load import engine_model, load_lm
from lld.policy import Policy
from lld.running import optimizers
from lld.running.run import Models


class Without:
    """The policy without its adapters: the reference of the KL term."""

    def __init__(self, policy: Policy):
        self.policy = policy

    def eval(self) -> None:
        self.policy.eval()

    @torch.no_grad()
    def __call__(self, *inputs):
        with adapters.switched_off(self.policy.lm):
            return self.policy(*inputs)


class Older(Without):
    """The policy with the adapters `weights`, by parameter name: those of an earlier step."""

    weights: dict[str, torch.Tensor]

    @torch.no_grad()
    def __call__(self, *inputs):
        own = {name: self.policy.lm.get_parameter(name) for name in self.weights}
        kept = {name: weight.data for name, weight in own.items()}
        for name, weight in own.items():
            weight.data = self.weights[name].to(weight.device)
        try:
            return self.policy(*inputs)
        finally:
            for name, weight in own.items():
                weight.data = kept[name]


def load_models(
    cfg: Config, accelerator: Accelerator, tokenizer, resumed: Path | None, plays: bool
) -> tuple[Models, torch.optim.Optimizer]:
    """The models and the optimizer of a run with adapters: new ones, or those of the checkpoint `resumed`.

    Raises ValueError where model.path holds adapters itself: a checkpoint names one base.
    """
    if adapters.base_of(cfg.model.path) is not None:
        raise ValueError(
            f"model.path = {cfg.model.path!r} holds adapters, and model.lora_rank = {cfg.model.lora_rank} "
            "asks for others on top: merge them into their base first (docs/one-gpu.md), or continue that "
            "run with --resume"
        )
    bf16 = accelerator.mixed_precision == "bf16"
    lm = load_lm(cfg.model, torch.bfloat16 if bf16 else torch.float32).to(accelerator.device)
    check_fit(lm, tokenizer, cfg.rollout.max_episode_tokens)
    copy = rollout_copy(lm, cfg.model.lora_targets) if plays else None
    if cfg.model.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    adapters.add(lm, cfg.model)
    if resumed is not None:
        adapters.read(lm, resumed)
    policy = Policy(lm)
    optimizer = optimizers.make(policy, cfg.optim, torch.float32)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    bare = accelerator.unwrap_model(policy)
    reference = Without(bare) if cfg.loss.kl_weight > 0 else None
    anchor = Older(bare) if cfg.loss.lld_lag_steps else None
    return Models(policy, bare, bare.lm, copy, reference, anchor), optimizer


def rollout_copy(lm: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    """A copy of `lm`, which has no adapters yet, for the engine; matrices not in `targets` are shared."""
    copy = engine_model(lm, lm.device, bf16=lm.dtype == torch.bfloat16, share=True)
    own = {weight.data_ptr() for weight in lm.parameters()}
    for name, module in copy.named_modules():
        # The rest was copied already by `join_weights`
        if name.rpartition(".")[2] in targets and module.weight.data_ptr() in own:
            module.weight = nn.Parameter(module.weight.clone(), requires_grad=False)
    return copy
