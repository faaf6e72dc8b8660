"""lld.share: what is uploaded, to a stand-in of the hub, and that the card's code plays the same episodes."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml
from conftest import ROOT, make_lm, make_tokenizer
from test_evaluate import one_thread, open_world, world  # noqa: F401 (fixtures)

from lld import settings
from lld.episode import Question
from lld.evaluate import evaluate_questions
from lld.evaluation.folder import checkpoint_files
from lld.files import fingerprint
from lld.model.folder import check_folder
from lld.protocol import encode_prompt
from lld.share import card
from lld.share import upload as command
from lld.share.usage import loading_code
from lld.tools import Passage


@pytest.fixture(scope="module")
def run_dir(world, tmp_path_factory):  # noqa: F811
    """A run with one checkpoint, of the hand-set policy, and its scores."""
    run_dir = tmp_path_factory.mktemp("runs") / "mine"
    ckpt = run_dir / "checkpoints" / "step_000002"
    shutil.copytree(world / "ckpt", ckpt)
    (ckpt / "trainer_state.pt").write_bytes(b"moments")
    (ckpt / "model.safetensors").chmod(0o600)
    files = {path.name: fingerprint(path) for path in ckpt.iterdir()}
    (ckpt / "manifest.json").write_text(json.dumps({"num_steps": 2, "files": files}))
    options = yaml.safe_load((world / "tiny.yaml").read_text())
    options |= {"run": {"dir": str(run_dir), "steps": 2}, "optim": {"lr": 3e-5}}
    options["data"] = {"train": "org/questions"}
    settings.save(settings.from_dict(options), run_dir / "config.yaml")
    (run_dir / "run.json").write_text(json.dumps({"commit": "abc123", "sessions": [{"host": "secret-host"}]}))
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "eval/nq/em": 0.25}\n')
    (run_dir / "figure.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return run_dir


def share(run_dir, *more):
    return command.main([str(run_dir), "--to", "org/agent", *more])


def test_a_dry_run_leaves_what_would_be_uploaded(run_dir, tmp_path, capsys):
    assert share(run_dir, "--dry-run") == 0
    out = run_dir / "share"
    names = {path.name for path in out.iterdir()}
    assert {"README.md", "figure.png", "config.json", "model.safetensors", "tokenizer.json"} <= names
    with pytest.raises(ValueError, match="did you mean .*mine/checkpoints/step_000002"):
        check_folder(str(run_dir), "--ckpt")  # and not the folder just made
    assert not names & {"trainer_state.pt", "manifest.json", "eval"}
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    ckpt = run_dir / "checkpoints" / "step_000002"
    assert not (out / "config.json").samefile(ckpt / "config.json")  # it may be edited
    text = (out / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["datasets"] == ["org/questions"] and front["base_model"] == "Qwen/Qwen2.5-3B"
    assert "lld" in front["tags"] and front["library_name"] == "transformers"
    assert "nq 0.250" in text and "abc123" in text and "GRPO + LLDS" in text and "for 2 rollout steps" in text
    # Neither names nor folders of the machine that trained it
    assert str(tmp_path.parent) not in text and str(run_dir) not in text and "secret-host" not in text
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    assert recipe["optim"] == {"lr": 3e-5} and recipe["retriever"]["corpus"].endswith("/corpus.jsonl")
    cfg = settings.from_dict(recipe)
    assert (cfg.run.steps, cfg.retriever.url, cfg.rollout.max_new_tokens) == (2, None, 8)


def test_a_card_of_adapters_says_what_opens_them(run_dir, tmp_path):
    shutil.copytree(run_dir / "checkpoints" / "step_000002", tmp_path / "step_000002")
    (tmp_path / "step_000002" / "adapter_config.json").write_text("{}")
    cfg = settings.load(str(run_dir / "config.yaml"))
    text = card.write_card("org/agent", tmp_path / "step_000002", run_dir, cfg)
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "peft"
    assert "`pip install peft`" in text and "`merge_and_unload`" in text
    assert not card.on_hub("./here/model") and not card.on_hub("a/b/c") and card.on_hub("Qwen/Qwen2.5-3B")


def test_scores_come_with_intervals(run_dir):
    ckpt = run_dir / "checkpoints" / "step_000002"
    row = {"num_questions": 40, "em": 0.5, "em_interval": [0.35, 0.65], "f1": 0.6, "searches": 1.25}
    (ckpt / "eval").mkdir(exist_ok=True)
    (ckpt / "eval" / "results.json").write_text(json.dumps({"benchmarks": {"nq": row}}))
    assert share(run_dir, "--dry-run") == 0
    assert "| nq | 40 | 0.500 | 0.350 – 0.650 | 0.600 | 1.25 |" in (run_dir / "share/README.md").read_text()
    (ckpt / "eval" / "results.json").write_text(json.dumps({"benchmarks": {"nq": {}}}))
    assert share(run_dir, "--dry-run") == 2
    shutil.rmtree(ckpt / "eval")


def test_what_is_somebody_elses_is_left_alone(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    assert share(run_dir, "--dry-run", "--out", str(out)) == 0
    (out / "README.md").write_text("# Mine\n")
    assert share(run_dir, "--dry-run", "--out", str(out)) == 0
    assert (out / "README.md").read_text() == "# Mine\n" and "has been edited" in capsys.readouterr().err
    (out / "diary.txt").write_text("dear")
    assert share(run_dir, "--dry-run", "--out", str(out)) == 2 and "diary.txt" in capsys.readouterr().err
    weights = run_dir / "checkpoints" / "step_000002" / "config.json"
    kept = weights.read_text()
    weights.write_text(kept + " ")
    assert share(run_dir, "--dry-run") == 2 and "it is damaged" in capsys.readouterr().err
    weights.write_text(kept)
    for wrong, message in {
        str(tmp_path): "give a run's folder",
        str(run_dir): "must be ORGANISATION/NAME",
    }.items():
        assert command.main([wrong, "--to", "agent"]) == 2 and message in capsys.readouterr().err


# ---- the code in the card ----


def test_the_cards_code_plays_the_episode_that_lld_plays(world, run_dir):  # noqa: F811
    cfg, tokenizer, engine, _ = open_world(world)
    asked = []

    def search(query):
        asked.append(query)
        return [("Ada", f"{query} was born in Arden."), ("Cole", "Cole was born in Brill.")]

    def find(queries):
        return [[Passage("", f'"{title}"\n{text}') for title, text in search(query)] for query in queries]

    ckpt = run_dir / "checkpoints" / "step_000002"
    code, vllm = loading_code(str(ckpt), ckpt, cfg)
    compile(vllm, "vllm", "exec")  # not installed here
    names = {}
    exec(code, names)
    texts = ["question of kind alpha", "question of kind beta?", "question of kind gamma"]
    questions = [Question(str(i), text, (), "") for i, text in enumerate(texts)]
    records = evaluate_questions(engine, tokenizer, questions, find, cfg, seed=0)
    queries, asked[:] = list(asked), []
    write, turns = names["write"], []
    names["write"] = lambda ids: turns.append(write(ids)) or turns[-1]
    assert [names["ask"](text, search) for text in texts] == [record["answer"] for record in records]
    assert asked == queries == ["ada"]
    assert [tokenizer.decode(turn) for turn in turns] == [t["text"] for r in records for t in r["turns"]]


def test_the_cards_code_ends_turns_as_lld_does_and_repeats_freely(tmp_path):
    """Qwen2.5's base models end a turn with <|im_end|>, not their EOS; others' files penalise repetitions."""
    tokenizer = make_tokenizer(chat=True)
    tokenizer.eos_token = "<|endoftext|>"
    lm, ids = make_lm(tokenizer), tokenizer.encode("who wrote it?")
    lm.generation_config.eos_token_id = tokenizer.eos_token_id
    written = lm.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    ended, written = tokenizer.convert_tokens_to_ids("<|im_end|>"), written.tolist()
    lm.generation_config.repetition_penalty = 5.0
    with torch.no_grad():
        lm.lm_head.weight[ended] = 1.0001 * lm.lm_head.weight[written[4]]
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, vllm = loading_code(
        str(tmp_path), tmp_path, settings.from_dict({"model": {"mixed_precision": "no"}})
    )
    names = {}
    exec(code, names)
    assert names["write"](ids) == [*written[: written.index(written[4])], ended]
    assert "<|im_end|>" in vllm


def test_the_cards_code_has_the_prompts_of_training_where_the_template_prints_a_date(tmp_path):
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }} " + tokenizer.chat_template
    make_lm(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    names, asked = {}, []
    exec(loading_code(str(tmp_path), tmp_path, settings.from_dict({}))[0], names)
    names["write"] = lambda ids: asked.append(ids) or tokenizer.encode("<answer> Ada </answer>")
    assert names["ask"]("who?", None) == "Ada" and asked == [encode_prompt(tokenizer, "who?")]
    assert tokenizer.decode(asked[0]).startswith("26 July 2024")


def test_sharded_weights_come_with_their_index(tmp_path):
    make_lm(make_tokenizer()).save_pretrained(tmp_path, max_shard_size="100KB")
    names = [path.name for path in checkpoint_files(tmp_path)]
    assert "model.safetensors.index.json" in names and "model-00001-of-" in "".join(names)


# ---- uploading ----


class Hub:
    """Takes uploads as the hub does: files of 1,000 bytes and more by a PUT of their own."""

    def __init__(self, token: str):
        self.stored, self.created, self.commits = {}, [], []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_PUT(self):
                hub.stored[self.path.removeprefix("/storage/")] = self.read()
                self.answer(200, {})

            def read(self):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def do_POST(self):
                body = self.read()
                if self.headers.get("Authorization") != f"Bearer {token}":
                    return self.answer(401, {"error": "who are you?"})
                return self.answer(200, hub.reply(self.path, body))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, path: str, body: bytes) -> dict:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/org/agent", "name": "org/agent"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/models/org/agent/preupload/main":
            files = json.loads(body)["files"]
            modes = [(file["path"], "lfs" if file["size"] >= 1000 else "regular") for file in files]
            return {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes]}
        if path == "/org/agent.git/info/lfs/objects/batch":
            objects = [
                o | {"actions": {"upload": {"href": f"{self.url}/storage/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return {"transfer": "basic", "objects": objects}
        assert path == "/api/models/org/agent/commit/main", path
        self.commits.append([json.loads(line) for line in body.splitlines()])
        return {"success": True, "commitOid": "c0ffee", "commitUrl": f"{self.url}/org/agent/commit/c0ffee"}


def upload(folder, url, token, private=False):
    code = (
        "import sys; from pathlib import Path; from lld.share.upload import upload\n"
        f"print(upload(Path(sys.argv[1]), 'org/agent', {private}))"
    )
    env = os.environ | {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_TOKEN": token, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env |= {"HF_HOME": str(folder.parent / "hf-home")}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, env=env, capture_output=True, text=True
    )


def test_every_file_arrives_as_it_is_and_a_refusal_says_what_to_do(tmp_path):
    folder, hub = tmp_path / "share", Hub("hf_right")
    folder.mkdir()
    wanted = {
        "README.md": b"---\ntags: [lld]\n---\n# A\n",
        "config.json": b"{}",
        "model.safetensors": b"w" * 5000,
    }
    for name, data in wanted.items():
        (folder / name).write_bytes(data)
    done = upload(folder, hub.url, "hf_right", private=True)
    assert done.returncode == 0 and done.stdout.strip() == f"{hub.url}/org/agent", done.stderr
    assert "private" in (hub.created[0].get("visibility"), *hub.created[0])
    arrived = {}
    for line in hub.commits[0][1:]:
        value = line["value"]
        if line["key"] == "file":
            arrived[value["path"]] = base64.b64decode(value["content"])
        else:
            arrived[value["path"]] = hub.stored[value["oid"]]
    assert arrived == wanted
    done = upload(folder, hub.url, "hf_wrong")
    assert "ConnectionError: the hub refused org/agent with status 401: `hf auth login`" in done.stderr
    hub.server.shutdown()
    hub.server.server_close()
    assert "ConnectionError: the hub did not answer" in upload(folder, hub.url, "hf_right").stderr


def test_a_hub_that_refuses_ends_in_one_line_and_keeps_the_folder(run_dir, tmp_path, monkeypatch, capsys):
    def refuse(folder, name, private):
        raise ConnectionError("the hub refused")

    monkeypatch.setattr(command, "upload", refuse)
    assert share(run_dir, "--out", str(tmp_path / "out")) == 3
    assert "the same command tries again" in capsys.readouterr().err
    assert (tmp_path / "out" / "README.md").is_file()
