"""The code in a model card: how to play an episode with transformers or vLLM, without lld."""

from pathlib import Path

from lld import protocol
from lld.config import Config

# `ask` is the same for both libraries, which differ in `write`: token ids -> the model's next turn.
LOOP = '''\
PROMPT = {prompt!r}
INVALID = {invalid!r}


def encode(text):
    return tokenizer.encode(text, add_special_tokens=False)


def ask(question, search, searches={turns}):
    """`search` maps a query to its passages, as (title, text); training showed {topk} a query."""
    question = question.strip()
    text = PROMPT.format(question=question if question.endswith("?") else question + "?")
{chat}    ids = encode(text)
    for _ in range(searches + 1):
        new = write(ids)
        turn = tokenizer.decode(new)
        if "</answer>" in turn:
            return turn.split("<answer>")[-1].split("</answer>")[0].strip()
        seen = INVALID
        if "</search>" in turn:
            found = search(turn.split("<search>")[-1].split("</search>")[0].strip())
            docs = "".join(f'Doc {{i}}(Title: "{{a}}") {{b}}\\n' for i, (a, b) in enumerate(found, 1))
            seen = {head!r} + docs.strip() + {tail!r}
        ids = ids + new + encode(seen)  # training cut `seen` to {observation} tokens
'''
CLOCK = """\
    from datetime import date  # that of every prompt in training, whatever the day was

"""
CHAT = """\
    message = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False{clock})
"""
TRANSFORMERS = """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STOPS = {stop!r}
tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r}, dtype={dtype}).eval()  # .to("cuda")
ends = model.generation_config.eos_token_id
ends = {{*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}}
ends |= {{tokenizer.get_vocab().get(mark) for mark in {marks!r}}}


def write(ids):
    def ended(rows, scores):  # one that works with every tokenizer, unlike generate's own stop_strings
        text = tokenizer.decode(rows[0, len(ids) :])
        return torch.tensor([any(stop in text for stop in STOPS)], device=rows.device)

    prompt = torch.tensor([ids], device=model.device)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens={tokens},
        do_sample=False,
        repetition_penalty=1.0,  # training had none, whatever the checkpoint's generation_config says
        eos_token_id=sorted(ends - {{None}}),
        stopping_criteria=[ended],
    )
    return out[0, len(ids) :].tolist()


"""
VLLM = """\
from vllm import LLM, SamplingParams

llm = LLM(model={name!r})
tokenizer = llm.get_tokenizer()
ends = {{tokenizer.get_vocab().get(mark) for mark in {marks!r}}} - {{None}}
params = SamplingParams(
    temperature=0.0,
    max_tokens={tokens},
    stop={stop!r},
    include_stop_str_in_output=True,
    stop_token_ids=sorted(ends),  # beside the EOS of tokenizer and generation_config
)


def write(ids):
    return list(llm.generate({{"prompt_token_ids": ids}}, params)[0].outputs[0].token_ids)
"""


def loading_code(name: str, ckpt: Path, cfg: Config) -> tuple[str, str]:
    """The code for transformers, with the loop that plays an episode, and what replaces its top for vLLM."""
    config_text = ckpt / "tokenizer_config.json"
    places = [*ckpt.glob("chat_template*"), *([config_text] if config_text.is_file() else [])]
    templates = "".join(path.read_text(encoding="utf-8") for path in places if path.is_file())
    has_template = any(ckpt.glob("chat_template*")) or '"chat_template"' in templates
    has_date = has_template and "strftime_now" in templates
    clock = f", strftime_now=date.fromisoformat({protocol.TODAY!r}).strftime" if has_date else ""
    values = {
        "name": name,
        "stop": list(protocol.STOP_STRINGS),
        "tokens": cfg.rollout.max_new_tokens,
        "marks": protocol.TURN_ENDS if has_template else (),
        "dtype": "torch.bfloat16" if cfg.model.mixed_precision == "bf16" else '"auto"',
    }
    loop = LOOP.format(
        prompt=protocol.PROMPT,
        invalid=protocol.INVALID_ACTION,
        turns=cfg.eval.max_turns,
        topk=cfg.retriever.topk,
        chat=CLOCK * has_date + CHAT.replace("{clock}", clock) * has_template,
        head=protocol.OBSERVATION_HEAD,
        tail=protocol.OBSERVATION_TAIL,
        observation=cfg.rollout.max_observation_tokens,
    )
    return TRANSFORMERS.format(**values) + loop, VLLM.format(**values)
