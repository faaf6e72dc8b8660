"""The report page: what it holds is what was logged, and in a browser it draws, switches and shows hostile
text as text."""

import html
import json
import math
import random
import re
import shutil
import subprocess

import pytest
import yaml

from lld.config import Config
from lld.record import courses, runs
from lld.record.contexts import CONTEXTS
from lld.record.glossary import GLOSSARY
from lld.record.metrics import described
from lld.report import compact, figure, page
from lld.settings import to_dict

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x "
    "onerror=\"document.title='owned'\"><!-- &lt;b&gt; {{content}} \u2028\u2029 \ud800 \u202e $& "
    "</style>"
)
PEOPLE = ("the North Queensland Cowboys", "North Queensland", "Ada Quill", "the Cowboys")
BY_BOTH, BY_CONTEXT = (
    ("entropy", "likelihood", "displacement"),
    ("entropy", "advantage", "kept_mass", "drift", "context"),
)
PHASES = [0] * 10 + [1] * 10 + [2] * 10 + [3] * 10


# ---- made-up runs in the formats of train.py ----


def words(text):
    """Tokens that add up to `text`: a word with the space before it, tags cut in two as a byte-level
    tokenizer does."""
    return [
        piece
        for word in re.findall(r" ?[^\s<>]+|\s|[<>/]", text)
        for piece in ([word] if len(word) < 9 else [word[:5], word[5:]])
    ]


def make_episode(rng, step, question, sample, right, shift=0.0, hostile="", final=True):
    turns, tokens, actions, parts = [], [], [], []
    query = f"which club plays at stadium {question['id'][-1]}"
    passages = [
        {
            "id": str(k),
            "contents": f'"Stadium {k}"\nThe club of stadium {k} is {PEOPLE[k]}.{hostile}',
            "score": 3.5 - k,
        }
        for k in range(3)
    ]
    answer = PEOPLE[0] if right else PEOPLE[1 + sample % 2]
    for number in range(2):
        thought = (
            f"<think> I should look up the stadium{hostile} before I answer </think>"
            if number == 0
            else f"<think> sample {sample} says so </think>"
        )
        action = f"<search> {query} </search>" if number == 0 else f"<answer> {answer} </answer>"
        start = len(tokens)
        for text, part in ((thought, 1), (action, 3 if number else 2)):
            new = words(text)
            tokens, parts, actions = (
                tokens + new,
                parts + [part] * len(new),
                actions + [number + 1] * len(new),
            )
            tag_start = len(tokens) - len(new)
        end = len(tokens)
        seen = (
            words("\n\n<information>" + "".join(p["contents"] for p in passages) + "</information>\n\n")
            if number == 0
            else []
        )
        tokens, parts, actions = tokens + seen, parts + [0] * len(seen), actions + [0] * len(seen)
        turn = {
            "start": start,
            "tag_start": tag_start,
            "end": end,
            "observation_end": len(tokens),
            "kind": "answer" if number else "search",
            "content": answer if number else query,
        }
        turns.append(
            turn | {"stop": "stop_string", "searched": number == 0, "passages": [] if number else passages}
        )
    old = [-rng.expovariate(3) if action else None for action in actions]

    def moved(scale):
        return [
            value + rng.gauss(shift if right else -0.05, scale) if value is not None else None
            for value in old
        ]

    new = moved(0.05)

    def gate(open_):
        return [int(bool(action) and open_(t)) for t, action in enumerate(actions)]

    gates = {
        "token": gate(lambda t: new[t] < old[t]),
        "action": gate(lambda t: actions[t] == 1),
        "response": gate(lambda t: True),
    }
    return {
        "step": step,
        "question": question,
        "sample": sample,
        "prompt": f"Question: {question['text']}\n",
        "reward": float(right),
        "em": float(right),
        "advantage": 0.9 if right else -0.7,
        "stop_reason": "answer",
        "answer": answer,
        "turns": turns,
        "tokens": tokens,
        "action_ids": actions,
        "part_ids": parts,
        "sampled": old,
        "old": old,
        "new": new,
        "final": moved(0.1) if final else None,
        "gates": gates,
    }


def make_group(rng, step, k, shift=0.0, hostile="", final=True, rights=2):
    """Five episodes of a question, the first `rights` of them right; where all are equal, no advantage."""
    question = {
        "id": f"made/{step}-{k}",
        "text": f"Which club plays at stadium {k}, and in which city is its base?{hostile}",
        "golden_answers": [PEOPLE[0]],
        "source": "made",
    }
    group = [
        make_episode(rng, step, question, sample, sample < rights, shift, hostile, final)
        for sample in range(5)
    ]
    return [row | ({} if 0 < rights < 5 else {"advantage": 0.0}) for row in group]


def make_row(rng, step, steps, shift):
    at = step / steps
    row = {
        "step": step,
        "reward/mean": 0.3 + 0.4 * math.sin(3 * at + shift) + rng.gauss(0, 0.03),
        "entropy": 0.3 + at**4,
        "grad_norm": 0.5 if at < 0.8 else 9.0,
        "grad_norm_max": 1.0,
        "skipped_updates": 0,
    }
    row |= {
        "searches": 1.3 + at,
        "response_tokens": 37.0,
        "valid_searches": 0.97,
        "ratio/q999": 1.5,
        "ratio/clipped": 0.01,
        "phase": PHASES[min(39, int(40 * at))],
    }
    for group, base in (("correct", -0.1), ("incorrect", -0.4), ("neutral", -0.2)):
        row |= {
            f"likelihood/{group}_old": base - at,
            f"likelihood/{group}_new": base - at - 0.01,
            f"displacement/{group}": rng.gauss(-0.01 * at, 0.005),
            f"displaced/{group}/responses": 0.5,
            f"entropy/{group}": 0.3 + at,
        }
        row |= {f"{name}/{group}/{context}": base + at for name in BY_BOTH for context in CONTEXTS}
        row |= {
            f"{prefix}displacement/{group}/{part}/turn{turn}": rng.gauss(-0.01 * at, 0.01)
            for prefix in ("", "final/")
            for part in ("think", "search", "answer")
            for turn in (1, 2, 3)
            if not prefix or step % 5 == 0
        }
    row |= {
        f"gate/{gate}/{kind}": rng.random() / 2
        for gate in ("token", "action", "response")
        for kind in ("open", "penalty")
    }
    row |= {f"nll/searches{k}": 0.2 + 0.1 * k + at / 5 for k in range(4)} | {
        "wrong/first_action": -0.2 - at,
        "wrong/second_action": -0.5 - at / 3,
        "wrong/observation_match": at / 2,
    }
    row |= {f"{name}/{context}": at for name in BY_CONTEXT for context in CONTEXTS}
    row |= {"kept_mass": 0.9, "advantage": -at, "drift": at}
    if step % 10 == 0:
        row |= {"sentinel/likelihood": -0.1 - at, "eval/made/em": 0.4 + at / 3}
    return row


def make_run(
    folder,
    *,
    steps=40,
    every=10,
    groups=2,
    hostile="",
    seed=0,
    lld_weight=0.2,
    shift=0.0,
    final=True,
    rights=(2, 5, 0, 3),
):
    """A run folder in today's formats."""
    rng = random.Random(seed)
    (folder / "trajectories").mkdir(parents=True)
    rows = [make_row(rng, step, steps, shift) for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    updates = [
        {"step": step, "update": u, "displacement/correct": -0.01 * u, "grad_norm": 1.0}
        for step in range(steps)
        for u in range(4)
    ]
    (folder / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in updates))
    options = to_dict(Config())
    options["run"] |= {"dir": str(folder), "seed": seed, "steps": steps}
    options["loss"]["lld_weight"] = lld_weight
    options["data"]["train"] = "made/train.jsonl" + hostile.replace("\ud800", "")
    (folder / "config.yaml").write_text(yaml.safe_dump(options))
    (folder / "run.json").write_text(json.dumps({"commit": "0123456789abcdef" + hostile}))
    for step in range(0, steps, every):
        lines = [
            json.dumps(row)
            for k in range(groups)
            for row in make_group(
                rng,
                step,
                k,
                shift=-0.02 if step else 0.02,
                hostile=hostile,
                final=final,
                rights=rights[k % 4],
            )
        ]
        (folder / "trajectories" / f"step_{step:06d}.jsonl").write_text(
            "".join(line + "\n" for line in lines)
        )
    return folder


# ---- without a browser ----


def test_every_name_the_page_draws_is_in_the_glossary():
    script = page.TEMPLATE.read_text()
    names = set(re.findall(r'\[\["([a-z_0-9]+/?[a-z_0-9/]*)", "', script)) | set(
        re.findall(r'\["((?:likelihood|displacement|final|wrong|displaced)/[a-z_/]+)"', script)
    )
    # A switch
    assert len(names) > 15 and {name for name in names if not described(name)} == {"new"}


def test_escaped_json_holds_no_markup_and_loses_nothing():
    content = {"text": HOSTILE, "list": [1, None, 0.5]}
    text = compact.escaped_json(content)
    assert not set("<>&\u2028\u2029") & set(text)
    # A lone surrogate is no character
    assert json.loads(text) == {**content, "text": HOSTILE.replace("\ud800", "\ufffd")}
    with pytest.raises(ValueError):
        compact.escaped_json([float("nan")])


def test_a_hostile_run_leaves_the_markup_of_the_page_as_it_was(tmp_path):
    tame, wild = make_run(tmp_path / "tame"), make_run(tmp_path / "wild", hostile=HOSTILE)

    def count(run):
        return (
            page.write_page([run], run / "report.html"),
            [
                len(re.findall(tag, (run / "report.html").read_text()))
                for tag in ("<", ">", "<script", "</script", "<!--")
            ],
        )[1]

    assert count(tame) == count(wild)


def test_policy_names_the_one_script_and_the_one_style_sheet(tmp_path):
    text = "".join(page.render({"runs": []}, {}))
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and set(rules) == {
        "default-src",
        "script-src",
        "style-src",
        "base-uri",
        "form-action",
    }
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        assert rules[f"{tag}-src"] == page._hash(inside)
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|outerHTML|insertAdjacent|document\.write|"
        r"""\beval\(|new Function|\son\w+=|\bstyle=""",
        text,
    )


def test_columns_hold_the_rows_to_five_digits():
    rows = [
        {"step": 3, "a": 1.23456789, "b": 2},
        {"step": 4, "a": float("nan"), "c": "x"},
        {"step": 7, "a": -1e-9, "b": None},
        {"step": 8, "a": 5.0},
    ]
    assert page.columns(rows) == {
        "a": {"v": [1.2346, None, -1e-9, 5.0]},
        "b": {"i": [0], "v": [2]},
        "c": {"i": [], "v": []},
    }


def test_question_displacement_against_a_naive_loop(tmp_path):
    run = make_run(tmp_path / "run", groups=4)
    about, _ = compact.collect_trajectories(run, 10**9)
    naive = []
    for path in sorted((run / "trajectories").iterdir()):
        by_question = {}
        for line in path.read_text().splitlines():
            episode = json.loads(line)
            total = 0.0
            for t in range(len(episode["tokens"])):
                if episode["action_ids"][t] > 0:
                    total += episode["final"][t] - episode["old"][t]
            if episode["advantage"] > 0:
                by_question.setdefault(episode["question"]["text"], []).append(total)
        naive += [
            (episode["step"], text, sum(values) / len(values), len(values))
            for text, values in by_question.items()
        ]
    drawn = [
        (step["step"], bar["question"], bar["delta"], bar["responses"])
        for step in about["bars"]
        for bar in step["bars"]
    ]
    # Two groups of four are all right or all wrong
    assert [(s, q, n) for s, q, _, n in drawn] == [(s, q, n) for s, q, _, n in naive] and len(drawn) == 8
    assert [d for _, _, d, _ in drawn] == pytest.approx([d for _, _, d, _ in naive], rel=1e-4)
    assert about["later"] == "final"


def test_question_displacement_by_hand_and_without_rescoring(tmp_path):
    row = {
        "question": {"text": "q"},
        "advantage": 1.0,
        "old": [-1.0, None, -2.0],
        "new": [-1.5, None, -1.75],
        "final": None,
        "action_ids": [1, 0, 2],
    }
    assert compact.question_displacement(
        [row, row | {"advantage": -1.0, "new": [9.0, None, 9.0]}], "new"
    ) == {
        "question": "q",
        "delta": -0.25,
        "responses": 1,
    }
    assert (
        compact.question_displacement([row | {"advantage": 0.0}], "new") is None
        and compact.question_displacement([row | {"new": [float("nan"), None, 0.0]}], "new") is None
    )
    assert compact.collect_trajectories(make_run(tmp_path / "run", final=False), 10**9)[0]["later"] == "new"


def test_compact_step_gives_back_what_was_recorded():
    group = make_group(random.Random(1), 0, 0, hostile=HOSTILE)
    step = json.loads(compact.escaped_json(compact.compact_step([group])))
    for row, episode in zip(group, step["groups"][0]["episodes"], strict=True):
        written = [t for t, action in enumerate(row["action_ids"]) if action]
        assert [step["words"][word] for word in episode["tokens"]] == [
            token.replace("\ud800", "\ufffd") for token in row["tokens"]
        ]
        assert [t for t, bit in enumerate(episode["written"]) if bit == "1"] == written and episode[
            "parts"
        ] == "".join(map(str, row["part_ids"]))
        for name in ("new", "final"):
            assert episode[name] == pytest.approx([row[name][t] - row["old"][t] for t in written], rel=1e-4)
        assert episode["gates"]["action"] == "".join(str(row["gates"]["action"][t]) for t in written)
        assert [step["passages"][k] for k, _ in episode["turns"][0][8]] == [
            [p["id"], p["contents"].replace("\ud800", "\ufffd")] for p in row["turns"][0]["passages"]
        ]


def test_a_question_drawn_twice_in_a_step_is_two_groups(tmp_path):
    rng = random.Random(0)
    twice = [row for _ in range(2) for row in make_group(rng, 3, 0)]
    path = tmp_path / "step_000003.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*twice, *make_group(rng, 3, 1)]))
    groups = compact.read_trajectories(path)
    assert [[row["sample"] for row in group] for group in groups] == [[0, 1, 2, 3, 4]] * 3
    assert [group[0]["question"]["id"] for group in groups] == ["made/3-0", "made/3-0", "made/3-1"]
    assert groups[0] == twice[:5] and groups[1] == twice[5:]


def test_the_clip_of_a_kind_that_has_none_has_no_bounds():
    def clip(**options):
        return page.clip_of(runs.defaults() | {f"loss.{name}": value for name, value in options.items()})

    assert clip(kind="grpo", clip_low=0.2, clip_high=0.3) == [0.8, 1.3]
    assert clip(kind="gmpo", clip_low=0.4, clip_high=0.4) == pytest.approx([math.exp(-0.4), math.exp(0.4)])
    assert clip(kind="gspo", clip_low=3e-4, clip_high=3.5e-4) == [1 - 3e-4, 1 + 3.5e-4]  # not rounded
    assert clip(kind="cispo") == clip(kind="sapo") == [0.0, None]
    assert page.clip_of({}) is None and clip(kind="grpo", clip_low="many") is None


def test_trajectories_are_thinned_evenly_to_the_room_there_is(tmp_path):
    assert compact.evenly([10] * 9, 90) == list(range(9)) and compact.evenly([10] * 9, 50) == [0, 2, 4, 6, 8]
    assert compact.evenly([10] * 9, 5) == [8] and compact.evenly([], 5) == []
    run = make_run(tmp_path / "run")
    whole, texts = compact.collect_trajectories(run, 10**9)
    some, kept = compact.collect_trajectories(run, sum(map(len, texts.values())) // 2)
    assert (
        whole["steps"] == [0, 10, 20, 30] and some["steps"] == [0, 30] == list(kept) and some["recorded"] == 4
    )
    assert some["bars"] == whole["bars"]


def test_by_update_against_a_naive_mean():
    rng = random.Random(0)
    rows = [
        {"step": step, "update": u, "displacement/correct": rng.random()}
        for step in range(5, 27)
        for u in range(3)
    ]
    quarters = page.by_update(rows)
    assert [(q["first_step"], q["last_step"]) for q in quarters] == [(5, 10), (11, 15), (16, 21), (22, 26)]
    for q in quarters:
        for u in range(3):
            values = [
                row["displacement/correct"]
                for row in rows
                if q["first_step"] <= row["step"] <= q["last_step"] and row["update"] == u
            ]
            assert q["means"][u] == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_differences_methods_and_settings():
    base = {
        "loss.kind": "grpo",
        "loss.lld_weight": 0.0,
        "optim.lr": 1e-4,
        "data.train": "a/x.jsonl",
        "retriever.corpus": "a/y",
        "run.dir": "a",
        "run.seed": 0,
    }
    other = base | {"loss.lld_weight": 0.2, "run.dir": "b", "run.seed": 1}
    third = base | {"data.train": "b/x.jsonl", "retriever.corpus": "b/y", "monitor.crash_box": 3}
    assert runs.differences([base, other]) == {"loss.lld_weight": [0.0, 0.2], "run.seed": [0, 1]}
    assert runs.differences([base, third])["monitor.crash_box"] == [None, 3]
    assert runs.differences([base, {}])["optim.lr"] == [1e-4, None]
    # The corpus says no more
    assert runs.settings([base, other]) == ["", ""] and runs.settings([base, third]) == [
        "data.train = a/x.jsonl",
        "data.train = b/x.jsonl",
    ]
    assert runs.differences([{"optim.lr": 1.0, "run.seed": 0}]) == {"optim.lr": [1.0, 1e-6]}
    # Options that split the runs alike are told by one of them, which then must split them itself
    starts = [
        {"model.path": f"runs/{name}/checkpoints/step_000100", "rollout.top_p": top_p}
        for name, top_p in (("x", 0.8), ("y", 1.0))
    ]
    assert runs.settings(starts) == [f"model.path = {some['model.path']}" for some in starts]
    assert [
        runs.method(some)
        for some in (base, other, other | {"loss.lld_gate": "token", "loss.lld_answer_schedule": "paper"})
    ] == ["GRPO", "GRPO + LLDS", "GRPO + LLDS-MA (token gate)"]


def test_an_option_that_a_runs_file_lacks_had_its_default(tmp_path):
    """A run made before an option existed compares with a newer one; without a file nothing is known."""
    made = [make_run(tmp_path / name, steps=12) for name in ("old", "new", "bare")]
    path = made[0] / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    del tree["rollout"]["weights"], tree["monitor"]["crash_box"]
    path.write_text(yaml.safe_dump(tree))
    (made[2] / "config.yaml").unlink()
    content, _ = page.page_content(made[:2])
    assert content["differences"] == {} and [run["setting"] for run in content["runs"]] == ["", ""]
    assert content["runs"][0]["options"]["rollout.weights"] == Config().rollout.weights
    bare = page.page_content(made[1:])[0]["runs"][1]
    assert bare["options"] == {} and bare["clip"] is None and bare["method"].startswith("unknown")


def test_outcome_by_hand():
    rows = [
        {
            "step": step,
            "reward/mean": 0.5 if step < 60 else 0.1,
            "grad_norm": 1.0 if step < 70 else 8.0,
            "phase": PHASES[step // 2] if step < 80 else 3,
            "skipped_updates": 1,
        }
        for step in range(90)
    ]
    rows[30]["grad_norm"] = 50.0  # one spike is no surge
    out = courses.outcome(rows, {"run.steps": 100})
    assert (out["steps"], out["steps_wanted"], out["verdict"], out["surge"], out["skipped_updates"]) == (
        90,
        100,
        "collapsed",
        70,
        90,
    )
    assert (
        out["phases"] == {1: (20, 39, 20), 2: (40, 59, 20), 3: (60, 89, 30)}
        and out["held_out"] == {}
        and out["likelihood"] is None
    )
    assert (
        out["reward"]["first"],
        out["reward"]["best"],
        out["reward"]["best_step"],
        out["reward"]["last"],
    ) == pytest.approx((0.5, 0.5, 9, 0.1))
    assert (
        courses.outcome(rows[:60], {})["verdict"] == "held"
        and courses.outcome([{"step": 0, "reward/mean": 0.0}], {})["verdict"] == "held"
    )


def test_outcome_of_a_run_that_rose_of_one_that_died_and_of_a_short_one():
    def course(rewards, phases=()):
        return courses.outcome(
            [
                {"step": step, "reward/mean": value, "phase": dict(phases).get(step, 0)}
                for step, value in enumerate(rewards)
            ],
            {},
        )

    assert (
        course([0.3 + 0.005 * step for step in range(60)])["verdict"] == "rose"
        and course([0.5] * 60)["verdict"] == "held"
    )
    # No window of ten has a maximum to lose
    died = course([0.3, 0.1, *[0.0] * 18], [(step, 4) for step in range(5, 20)])
    assert died["verdict"] == "collapsed" and died["phases"] == {4: (5, 19, 15)}
    assert course([0.5] * 40, [(3, 1), (4, 1), (30, 1)])["phases"] == {1: (3, 30, 3)}
    # Of 0 or of a punishment there is no share
    rising = [0.0] * 15 + [0.02 * step for step in range(25)]
    assert course(rising)["verdict"] == "rose" and course([0.0] * 40)["verdict"] == "held"
    assert course([-0.2] * 20 + [-0.8] * 20)["verdict"] == "collapsed"
    assert course([-0.8] * 20 + [-0.2] * 20)["verdict"] == "rose"
    assert course([-0.2] * 20 + [-0.22] * 20)["verdict"] == "held"
    assert course([-0.8] * 20 + [0.02] * 15 + [0.0] * 20)["verdict"] == "rose"
    four = course([0.1, 0.3, 0.4, 0.6])["reward"]  # of ten steps there is but one window: 0.35 -> 0.35
    assert (four["first"], four["last"], four["best"], four["window"]) == pytest.approx((0.2, 0.5, 0.5, 2))


def test_command_writes_page_and_figure_and_more_runs_than_the_figure_holds(tmp_path, capsys):
    made = [make_run(tmp_path / f"run{k}", steps=12, seed=k) for k in range(7)]
    assert (
        figure.main([str(made[0])]) == 0
        and (made[0] / "report.html").is_file()
        and (made[0] / "figure.png").is_file()
    )
    assert figure.main([*map(str, made), "--to", str(tmp_path)]) == 0
    assert (
        "no figure.png" in capsys.readouterr().out
        and (tmp_path / "report.html").is_file()
        and not (tmp_path / "figure.png").exists()
    )
    recorded = made[0] / "trajectories" / "step_000000.jsonl"
    recorded.write_text(
        recorded.read_text().replace('"step": 0,', '"step": "0\\"><meta http-equiv=refresh>",')
    )
    assert (
        figure.main([str(made[0])]) == 2
        and "step_000000.jsonl line 1 is damaged (step = '0\"><meta http-equiv=refresh>' is no whole number"
        in capsys.readouterr().err
    )
    recorded.write_text("{\n")
    assert (
        figure.main([str(made[0])]) == 2 and "step_000000.jsonl line 1 is damaged" in capsys.readouterr().err
    )


# ---- in a browser ----

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
)


def browse(tmp_path, path, state="", window="1280,900", more=()):
    """The page's elements once its script has run, as text; fails on any console message."""
    run = subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            *more,
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={window}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            f"{path.as_uri()}#{state}",
        ],
        capture_output=True,
        timeout=240,
        encoding="utf-8",
        errors="replace",
    )
    assert "CONSOLE" not in run.stderr, [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    dom = re.sub(r"<script\b.*?</script>", "", run.stdout, flags=re.S)
    assert "data-drawn" in dom, run.stderr[-2000:]
    return dom


def tokens(dom):
    """[(class, text)] of the tokens in the samples."""
    samples = dom[dom.index('class="samples"') :]
    return [
        (name, html.unescape(text))
        for name, text in re.findall(r'<span class="tok ([^"]*)">([^<]*)</span>', samples)
    ]


def naive_common(a, b):
    best = []
    for i in range(len(a)):
        for j in range(i + 1, len(a) + 1):
            if j - i > len(best) and any(a[i:j] == b[k : k + j - i] for k in range(len(b))):
                best = a[i:j]
    return best


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made = [make_run(folder / "grpo", lld_weight=0.0, shift=0.8, groups=4), make_run(folder / "llds", seed=1)]
    page.write_page(made, folder / "report.html")
    return folder / "report.html"


@needs_browser
@pytest.mark.parametrize(
    "view", ["overview", "figures", "displacement", "contexts", "trajectories", "glossary"]
)
def test_every_view_draws_without_a_console_message(tmp_path, built, view):
    dom = browse(tmp_path, built, f"view={view}")
    assert (
        f'data-drawn="{view}"' in dom
        and "not logged by these runs" not in dom
        and "NaN" not in dom
        and "undefined" not in dom
    )
    assert dom.count('class="line"') > {"overview": 20, "figures": 20, "displacement": 20}.get(view, -1)
    if view == "figures":
        assert (
            "Missing" not in dom
            and dom.count('class="paper"') == 9
            and dom.count("★</text>") + dom.count("★<title>") == 2
        )
        assert dom.count('class="bar-3a"') == 4 * (2 + 1)  # at each of 4 steps, the mixed groups of both runs
    if view == "contexts":  # every name of both runs
        assert "Missing" not in dom and dom.count('class="line"') == 2 * 3 * (3 + 1 + len(BY_CONTEXT))
    if view == "glossary":
        assert all(html.escape(name, quote=False) in dom for name in GLOSSARY)


@needs_browser
def test_colouring_switches_and_agrees_with_the_log(tmp_path, built):
    group = [
        json.loads(line)
        for line in (built.parent / "grpo" / "trajectories" / "step_000010.jsonl").read_text().splitlines()
    ][:5]
    ordered = sorted(group, key=lambda row: (-row["reward"], row["sample"]))
    painted = {}
    for color in ("delta", "ratio", "gate_action", "mask", "author"):
        seen = tokens(browse(tmp_path, built, f"view=trajectories&step=10&question=0&alike=0&color={color}"))
        if color in ("mask", "author"):  # observations are shown too
            assert [text.replace("↵\n", "\n") for _, text in seen] == [
                token for row in ordered for token in row["tokens"]
            ]
            seen = [pair for pair in seen if pair[0] != "off"]
        assert [text for _, text in seen] == [
            token
            for row in ordered
            for token, action in zip(row["tokens"], row["action_ids"], strict=True)
            if action
        ]
        painted[color] = [name for name, _ in seen]
    written = [(row, t) for row in ordered for t, action in enumerate(row["action_ids"]) if action]
    assert all(
        (name[:1] == "n") == (row["new"][t] < row["old"][t])
        for name, (row, t) in zip(painted["delta"], written, strict=True)
        if name
    )
    assert all(
        name.startswith("n") == (row["new"][t] < row["old"][t])
        for name, (row, t) in zip(painted["ratio"], written, strict=True)
        if name and name[0] in "np"
    )
    acts = [
        row["gates"]["action"][t] and row["advantage"] >= 0 and row["new"][t] < row["old"][t]
        for row, t in written
    ]
    assert [name == "act" for name in painted["gate_action"]] == [bool(value) for value in acts] and any(acts)
    assert set(painted["mask"]) == {"on"}
    assert painted["author"] == [
        "by-" + ("", "think", "search", "answer")[row["part_ids"][t]] for row, t in written
    ]


def with_options(folder, **options):
    """A made run whose config.yaml has these options of the loss."""
    path = folder / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["loss"] |= options
    path.write_text(yaml.safe_dump(tree))
    return folder


@needs_browser
def test_marks_of_clip_and_llds_follow_the_runs_own_loss(tmp_path):
    """CISPO clips no gradient away, GSPO the whole response's; LLDS may hold A > 0 and large falls alone."""
    losses = {
        "grpo": {"clip_low": 0.01, "clip_high": 0.01},
        "gspo": {"kind": "gspo", "clip_low": 0.01, "clip_high": 0.01},
        "cispo": {"kind": "cispo", "clip_low": 0.01, "clip_high": 0.01},
        "strict": {"lld_tolerance": 0.05},
        "sampler": {"clip_low": 0.01, "clip_high": 0.01, "old_logprobs": "sampler"},
        "dual": {"kind": "dual_clip", "clip_low": 0.5, "clip_high": 0.5, "clip_dual": 1.02},
        "positive": {"lld_preserve": "positive"},
    }
    made = [with_options(make_run(tmp_path / name, groups=1), **more) for name, more in losses.items()]
    path = "trajectories/step_000010.jsonl"
    rows = [json.loads(line) for line in (made[0] / path).read_text().splitlines()]
    for row in rows:  # a group with a neutral response, and a sampler other than the trainer
        row["advantage"] = 0.0 if row["sample"] == 4 else row["advantage"]
        row["sampled"] = [value and value - 0.02 for value in row["old"]]
    for folder in made:
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.write_page(made, tmp_path / "report.html")
    rows.sort(key=lambda row: (-row["reward"], row["sample"]))
    written = [(row, t) for row in rows for t, action in enumerate(row["action_ids"]) if action]
    change = [row["new"][t] - row["old"][t] for row, t in written]

    def painted(run, color):
        state = f"view=trajectories&run={run}&step=10&question=0&alike=0&color={color}"
        return [name for name, _ in tokens(browse(tmp_path, tmp_path / "report.html", state))]

    def cut(row, value):
        if row["advantage"] == 0:
            return False
        return value > math.log(1.01) if row["advantage"] > 0 else value < math.log(0.99)

    def mean(row):
        values = [row["new"][t] - row["old"][t] for t, action in enumerate(row["action_ids"]) if action]
        return sum(values) / len(values)

    expected = [cut(row, value) for (row, _), value in zip(written, change, strict=True)]
    assert [name.endswith("cut") for name in painted(0, "ratio")] == expected and any(expected)
    whole = [cut(row, mean(row)) for row, _ in written]
    assert [name.endswith("cut") for name in painted(1, "ratio")] == whole and len(set(whole)) == 2
    assert not any(name.endswith("cut") for name in painted(2, "ratio"))
    acts = [row["advantage"] >= 0 and value < -0.05 for (row, _), value in zip(written, change, strict=True)]
    assert [name == "act" for name in painted(3, "gate_response")] == acts and any(acts)
    past = [cut(row, value + 0.02) for (row, _), value in zip(written, change, strict=True)]
    assert [name.endswith("cut") for name in painted(4, "ratio")] == past and past != expected
    dual = [
        row["advantage"] < 0 and value > math.log(1.02)
        for (row, _), value in zip(written, change, strict=True)
    ]
    assert [name.endswith("cut") for name in painted(5, "ratio")] == dual and any(dual)
    holds = [row["advantage"] > 0 and value < 0 for (row, _), value in zip(written, change, strict=True)]
    assert [name == "act" for name in painted(6, "gate_response")] == holds and any(holds)


@needs_browser
def test_runs_of_different_llds_are_not_averaged(tmp_path):
    options = [{"lld_weight": 0.0}, {}, {"lld_weight": 5.0}, {"lld_preserve": "positive"}]
    made = [with_options(make_run(tmp_path / f"run{k}"), **some) for k, some in enumerate(options)]
    page.write_page(made, tmp_path / "report.html")
    dom = html.unescape(browse(tmp_path, tmp_path / "report.html", "view=figures"))
    assert ", mean of" not in dom and "GRPO + LLDS, weight 5, preserve nonnegative: run2" in dom
    assert "λ = 0.2, preserve positive: run3" in dom


@needs_browser
def test_as_many_values_as_a_long_comparison_has_are_drawn(tmp_path):
    """They were arguments of Math.min, of which a browser takes about 120,000."""
    names = [
        f"entropy/{group}/{context}" for group in ("correct", "incorrect", "neutral") for context in CONTEXTS
    ]
    row = json.dumps(dict.fromkeys(names, 0.5))[1:]
    (tmp_path / "run").mkdir()
    lines = (f'{{"step": {step}, {row}\n' for step in range(15_000))
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    page.write_page([tmp_path / "run"], tmp_path / "report.html")
    assert 'data-drawn="contexts"' in browse(tmp_path, tmp_path / "report.html", "view=contexts")


@needs_browser
def test_lookalikes_are_the_longest_common_spans(tmp_path, built):
    dom = browse(tmp_path, built, "view=trajectories&step=10&question=0")
    listed = [html.unescape(text) for text in re.findall(r'class="alike-item"><b>([^<]*)</b>', dom)]
    group = [
        json.loads(line)
        for line in (built.parent / "grpo" / "trajectories" / "step_000010.jsonl").read_text().splitlines()
    ][:5]
    wanted = set()

    def inside(row, turn, tag):
        return [t.strip() for t in row["tokens"][row["turns"][turn]["tag_start"] : row["turns"][turn]["end"]]]

    for right in (row for row in group if row["em"]):
        for wrong in (row for row in group if not row["em"]):
            for turn, tag in ((0, "search"), (1, "answer")):

                def strip(tokens):
                    return [t for t in tokens if t not in ("<", ">", tag, "/" + tag, "")]

                common = naive_common(strip(inside(right, turn, tag)), strip(inside(wrong, turn, tag)))
                wanted |= {"".join(common)} if len(common) > 1 else set()
    squeezed = {text.replace(" ", "") for text in listed}
    assert wanted <= squeezed and "NorthQueensland" in squeezed and "whichclubplaysatstadium0" in squeezed
    assert "the whole query" in dom and "same first passages as" in dom and ' alike">' in dom


@needs_browser
def test_pinned_token_shows_its_values(tmp_path, built):
    row = json.loads(
        (built.parent / "grpo" / "trajectories" / "step_000010.jsonl").read_text().splitlines()[0]
    )
    dom = browse(tmp_path, built, "view=trajectories&step=10&question=0&token=0.3")
    inspector = html.unescape(dom[dom.index('id="inspector"') :])
    assert (
        json.dumps(row["tokens"][3]) in inspector
        and f"−{-row['old'][3]:.4g}" in inspector
        and "visible" in inspector
    )


@needs_browser
def test_pointing_at_curves_tokens_and_spans(tmp_path, built, monkeypatch):
    """The page with a script at its end that moves the pointer, as no headless flag can."""
    moves = """
      const at = (element) => {
        const box = element.getBoundingClientRect();
        return { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true };
      };
      const point = (name, selector) => {
        const element = document.querySelector(selector);
        element.dispatchEvent(new PointerEvent(name, at(element)));
      };
      if (state.view === "overview") point("pointermove", "figure svg[role=img]");
      else { point("pointerover", ".samples .tok"); document.querySelector(".alike-item").click(); }
    </script>
    </body>"""
    template = tmp_path / "template.html"
    template.write_text(re.sub(r"</script>\s*</body>", lambda _: moves, page.TEMPLATE.read_text()))
    monkeypatch.setattr(page, "TEMPLATE", template)
    page.write_page([built.parent / "grpo"], tmp_path / "report.html")
    dom = browse(tmp_path, tmp_path / "report.html", "view=overview&smooth=1")
    readout = re.search(
        r'<div class="readout" style="visibility: visible[^>]*><b>step '
        r"(\d+)</b>.*?<span>([-−.\d]+)</span></div>",
        dom,
    )
    rows = runs.read_metrics(built.parent / "grpo")
    assert (
        float(readout[2].replace("−", "-")) == pytest.approx(rows[int(readout[1])]["reward/mean"], abs=5e-5)
        and 15 < int(readout[1]) < 25
    )
    dom = browse(tmp_path, tmp_path / "report.html", "view=trajectories&step=10&question=0")
    row = json.loads(
        (built.parent / "grpo" / "trajectories" / "step_000010.jsonl").read_text().splitlines()[0]
    )
    assert (
        f"ratio at the update</dt><dd>{math.exp(row['new'][0] - row['old'][0]):.3g}"[:-1] in dom
        and 'aria-pressed="true" class="alike-item"' in dom
    )
    lit = [text.strip() for name, text in tokens(dom) if "alike-on" in name]
    assert lit == ["North", "Quee", "nsland"] * 4  # in two right and two wrong answers


@needs_browser
def test_hostile_text_is_shown_as_text(tmp_path):
    run = make_run(tmp_path / "<img src=x onerror=alert(1)>", hostile=HOSTILE, steps=12)
    page.write_page([run], tmp_path / "report.html")
    tame = make_run(tmp_path / "tame", steps=12)
    page.write_page([tame], tmp_path / "tame.html")

    def elements(dom):
        return sorted(set(re.findall(r"<([a-z][a-zA-Z0-9]*)", dom)))

    for state in ("view=overview", "view=figures", "view=trajectories&color=author"):
        dom = browse(tmp_path, tmp_path / "report.html", state)
        assert elements(dom) == elements(
            browse(tmp_path, tmp_path / "tame.html", state)
        ) and "img" not in elements(dom)
        assert "<title>owned" not in dom and "&lt;img src=x" in dom
    assert "&lt;/script&gt;" in dom and "&amp;lt;b&amp;gt;" in dom


@needs_browser
def test_an_older_run_says_what_is_missing(tmp_path):
    run = tmp_path / "old"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "reward/mean": 0.5, "entropy": 0.1}) + "\n" for step in range(30))
    )
    page.write_page([run], tmp_path / "report.html")
    dom = browse(tmp_path, tmp_path / "report.html", "view=figures")
    assert dom.count("Missing:") == 7 and dom.count("not logged") >= 3
    assert "Missing:" in browse(tmp_path, tmp_path / "report.html", "view=trajectories")
    assert "Missing:" in browse(tmp_path, tmp_path / "report.html", "view=displacement")


@needs_browser
def test_the_first_group_shown_has_right_and_wrong_answers(tmp_path):
    run = make_run(tmp_path / "run", groups=4, steps=12, rights=(5, 0, 3, 2))
    page.write_page([run], tmp_path / "report.html")
    dom = browse(tmp_path, tmp_path / "report.html", "view=trajectories")
    assert (
        re.search(r'<p class="question">Which club plays at stadium 2', dom)
        and "nothing to tell apart" not in dom
    )
    listed = re.findall(r'<option value="(\d)"[^>]*>(\d)/5 right', dom)
    assert listed == [("2", "3"), ("3", "2"), ("0", "5"), ("1", "0")]
    assert "nothing to tell apart" in browse(
        tmp_path, tmp_path / "report.html", "view=trajectories&question=0"
    )


@needs_browser
def test_a_last_step_without_mixed_groups_is_not_the_one_shown_first(tmp_path):
    run = make_run(tmp_path / "run", groups=4, steps=12, rights=(5, 0, 3, 2))
    alike = make_run(tmp_path / "alike", groups=4, steps=12, rights=(5, 5, 0, 5))
    last = "trajectories/step_000010.jsonl"
    (run / last).write_text((alike / last).read_text())
    page.write_page([run], tmp_path / "report.html")
    dom = browse(tmp_path, tmp_path / "report.html", "view=trajectories")
    assert 'class="question"' in dom and "nothing to tell apart" not in dom
    assert "nothing to tell apart" in browse(tmp_path, tmp_path / "report.html", "view=trajectories&step=10")
    page.write_page([alike], tmp_path / "alike.html")
    dom = browse(tmp_path, tmp_path / "alike.html", "view=trajectories")
    assert 'class="question"' in dom and "nothing to tell apart" in dom


@needs_browser
@pytest.mark.parametrize(
    "view", ["overview", "figures", "displacement", "contexts", "trajectories", "glossary"]
)
def test_no_view_scrolls_sideways_on_a_phone(tmp_path, built, view):
    """In a frame of 420 pixels, which a window of a desktop's browser may not be."""
    frame = tmp_path / "frame.html"
    frame.write_text(f'''<!doctype html><body data-drawn="frame">
      <iframe width=420 height=860 src="{built.as_uri()}#view={view}"></iframe><script>
      setTimeout(() => {{
        const inside = document.querySelector("iframe").contentDocument.documentElement;
        document.body.dataset.beyond = inside.scrollWidth - inside.clientWidth;
      }}, 1500);</script>''')
    assert (
        re.search(
            r'data-beyond="(\d+)"', browse(tmp_path, frame, "x", more=("--allow-file-access-from-files",))
        )[1]
        == "0"
    )


@needs_browser
def test_the_overview_says_when_phases_were_and_what_is_hidden(tmp_path, built):
    dom = browse(tmp_path, built, "view=overview")
    assert (
        all(f" {text}</div>" in dom for text in ("displacement 10–19", "flattening 20–29", "spiral from 30"))
        and "<small>mean per step</small>" in dom
        and "Reward <small>" in dom
        and dom.count('class="verdict bad"') == 2  # both runs end in a spiral
        and "best 0.650 after 31 steps" in dom
    )
    dom = browse(tmp_path, built, "view=overview&hidden=0,1")
    assert (
        "all runs are switched off" in dom and "no evaluation logged" not in dom and "not logged" not in dom
    )


@needs_browser
def test_hidden_runs_are_not_drawn(tmp_path, built):
    both, one, none = (
        browse(tmp_path, built, f"view=overview&hidden={hidden}").count('class="line"')
        for hidden in ("", "0", "0,1")
    )
    assert both == 2 * one > 0 and none == 0


@needs_browser
def test_rounding_is_not_magnified(tmp_path):
    run, rng = make_run(tmp_path / "whole"), random.Random(0)
    log = run / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for row in rows:  # what a sampler that cuts nothing leaves of them
        row |= {"drift": rng.gauss(0, 1e-9), "kept_mass": 1 + rng.gauss(0, 1e-7)}
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.write_page([run], tmp_path / "report.html")
    dom = browse(tmp_path, tmp_path / "report.html", "view=contexts")
    for name, low, high in (("Predicted drift of entropy", -0.5, 0.5), ("Kept mass", 0.9, 1.1)):
        svg = dom[dom.index(f'aria-label="{name}, all tokens"') :]
        ticks = re.findall(r'text-anchor="end">([^<]*)</text>', svg[: svg.index("</svg>")])[:-1]
        values = [float(text.replace("\u2212", "-")) for text in ticks]
        assert low <= min(values) < max(values) <= high and max(values) - min(values) > 0.1, (name, ticks)
