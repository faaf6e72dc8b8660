"""`python -m lld.data get` against a stand-in for the hub: kills, damage, broken connections, full disks."""

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT
from hub import Hub
from huggingface_hub import constants

from lld.data import __main__ as program
from lld.data import get, load_questions

INDEX, CORPUS = "PeterJinGo/wiki-18-e5-index", "PeterJinGo/wiki-18-corpus"
PART_AA, PART_AB = f"{INDEX}/part_aa", f"{INDEX}/part_ab"
MIB = 1 << 20


def question(number: int) -> dict:
    return {"id": f"test_{number}", "question": f"who wrote book {number}?", "golden_answers": ["Ada"]}


def hub_files(folder: Path, part_bytes: int = 200_000) -> dict[str, bytes]:
    """The hub's files in small; part_bytes of the first of the index's two parts."""
    rows = [question(n) | {"data_source": "nq"} for n in range(40)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    lines = "".join(json.dumps({"id": str(n), "contents": f'"T {n}"\ntext {n}'}) + "\n" for n in range(900))
    draw = random.Random(0)
    return {
        "PeterJinGo/nq_hotpotqa_train/train.parquet": (folder / "train.parquet").read_bytes(),
        **{f"{get.FLASHRAG}/{path}": json.dumps(question(0)).encode() for path in get.BENCHMARKS.values()},
        f"{CORPUS}/wiki-18.jsonl.gz": gzip.compress(lines.encode()),
        PART_AA: draw.randbytes(part_bytes),
        PART_AB: draw.randbytes(120_000),
    }


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(hub_files(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    real = get.hf_hub_url
    monkeypatch.setattr(get, "hf_hub_url", lambda **where: real(**where, endpoint=hub.url))
    yield hub
    hub.close()


def run(to: Path, *options: str) -> int:
    return program.main(["get", "--to", str(to), *options])


def test_without_the_index_the_next_command_builds_one():
    assert program.next_commands(Path("data"), ["corpus"]).splitlines()[1:] == [
        "python -m lld.retrieval build --corpus data/wiki-18.jsonl --out indexes/e5-pq --index ivf-pq"
    ]


def test_everything_is_fetched_joined_and_unpacked_and_nothing_twice(hub, tmp_path, capsys):
    to = tmp_path / "a folder"
    assert run(to) == 0
    assert (to / "e5_Flat.index").read_bytes() == hub.files[PART_AA] + hub.files[PART_AB]
    packed = hub.files[f"{CORPUS}/wiki-18.jsonl.gz"]
    assert (to / "wiki-18.jsonl").read_bytes() == gzip.decompress(packed)
    told = capsys.readouterr().out
    assert "index: 320.0 kB on the hub, 320.0 kB to fetch, about 320.0 kB to write" in told
    assert f"retriever_server.py --index '{to}'/e5_Flat.index" in told
    assert len(load_questions(str(to / "questions" / "train.parquet"))) == 40
    sets = re.search(r"eval.benchmarks=\{(.*)\}", told)[1]
    for name, path in (item.split(": ") for item in sets.split(", ")):
        assert [q.text for q in load_questions(path, source=name)] == ["who wrote book 0?"]
    assert not [path for path in to.rglob("*") if path.name.endswith(".partial")]
    sent = dict(hub.sent)
    assert sent == {name: len(data) for name, data in hub.files.items()}
    assert run(to, "--delete-parts") == 0 and hub.sent == sent
    assert not (to / "part_aa").exists() and not (to / "wiki-18.jsonl.gz").exists()
    assert run(to) == 0 and hub.sent == sent, "what was joined needs its parts no more"
    assert "index: 320.0 kB on the hub, complete here" in capsys.readouterr().out


def test_a_killed_download_goes_on_where_it_ended(hub, tmp_path):
    hub.files[PART_AA] = random.Random(1).randbytes(24 * MIB)
    hub.stalled[PART_AA] = 22 * MIB
    to = tmp_path / "data"
    (to / "e5_Flat.index.partial").parent.mkdir()
    (to / "e5_Flat.index.partial").write_bytes(b"left by a kill while joining")
    command = [sys.executable, "-m", "lld.data", "get", "--to", str(to), "--what", "index"]
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not [path for path in to.glob("part_aa.*.partial") if path.stat().st_size >= 20 * MIB]:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert run(to, "--what", "index") == 2, "a second command of the same folder is refused"
    process.kill()
    process.wait()
    del hub.stalled[PART_AA]
    assert run(to, "--what", "index") == 0
    # The library writes blocks of 10 MiB
    assert hub.starts == [(PART_AA, 0), (PART_AA, 20 * MIB), (PART_AB, 0)]
    assert (to / "e5_Flat.index").read_bytes() == hub.files[PART_AA] + hub.files[PART_AB]


def test_a_damaged_part_is_refused_and_it_alone_is_fetched_again(hub, tmp_path, capsys):
    hub.damaged.add(PART_AB)
    assert run(tmp_path / "data", "--what", "index") == 3
    assert "error: part_ab arrived damaged" in capsys.readouterr().err
    assert not (tmp_path / "data" / "e5_Flat.index").exists()
    assert run(tmp_path / "data", "--what", "index") == 0
    assert hub.sent == {PART_AA: 200_000, PART_AB: 240_000}


def test_a_broken_connection_is_taken_up_within_the_call(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65536)
    hub.cut[PART_AA] = 150_000
    assert run(tmp_path / "data", "--what", "index") == 0
    assert hub.starts == [(PART_AA, 0), (PART_AA, 2 * 65536), (PART_AB, 0)]


def test_a_full_disk_is_refused_before_anything_is_fetched(hub, tmp_path, capsys, monkeypatch):
    gz, index = len(hub.files[f"{CORPUS}/wiki-18.jsonl.gz"]), 320_000
    free = 0
    monkeypatch.setattr(get.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))
    peak, peak_deleting = 4 * gz + 2 * index, max(4 * gz, 3 * gz + 2 * index)
    for free, options, code in (
        (peak - 1, [], 2),
        (peak_deleting - 1, ["--delete-parts"], 2),
        (peak_deleting, ["--delete-parts"], 0),
    ):
        assert run(tmp_path / "data", "--what", "corpus,index", *options) == code, (free, options)
        assert bool(hub.sent) == (code == 0)
    errors = capsys.readouterr().err.splitlines()
    assert "are needed at the peak: give --to on another disk" in errors[0] and "--delete-parts" in errors[0]
    assert "--delete-parts" not in errors[1]


def test_without_network_it_is_said_what_to_do(hub, tmp_path, capsys, monkeypatch):
    hub.close()
    assert run(tmp_path / "data") == 3
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(tmp_path / "data") == 3
    gone, offline = capsys.readouterr().err.splitlines()
    assert gone.startswith("error: the hub does not answer for PeterJinGo/nq_hotpotqa_train (ConnectError")
    assert offline.startswith("error: HF_HUB_OFFLINE is set")
    assert all("on a machine without network, run the same command" in line for line in (gone, offline))


def test_a_file_that_the_hub_has_not_is_named(hub, tmp_path, capsys):
    del hub.files[PART_AB]
    assert run(tmp_path / "data", "--what", "index") == 3 and not hub.sent
    assert "the hub refuses PeterJinGo/wiki-18-e5-index (404)" in capsys.readouterr().err


def test_files_fetched_by_other_means_are_compared_and_taken_or_left_alone(hub, tmp_path, capsys):
    to = tmp_path / "data"
    to.mkdir()
    (to / "part_aa").write_bytes(hub.files[PART_AA])
    assert run(to, "--what", "index") == 0 and hub.sent == {PART_AB: 120_000}
    for path in to.glob("[fp]*"):
        path.unlink()
    assert run(to, "--what", "index") == 0 and hub.sent == {PART_AB: 120_000}, "joined by hand"
    (to / get.RECORD).unlink()
    (to / "e5_Flat.index").write_bytes(b"mine")
    (to / "wiki-18.jsonl").write_bytes(b"mine")
    for what in ("index", "corpus"):
        assert run(to, "--what", what) == 2
        assert "is not what this command puts there: rename or delete it" in capsys.readouterr().err
    assert (to / "e5_Flat.index").read_bytes() == (to / "wiki-18.jsonl").read_bytes() == b"mine"
    with pytest.raises(SystemExit):
        run(to, "--what", "indices")
    assert "--what 'indices': known are questions, corpus, index" in capsys.readouterr().err
