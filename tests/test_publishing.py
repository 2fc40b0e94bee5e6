# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""What arrives at the Hub is the folder, and only a folder that is complete and clean is sent. The Hub is a stand-in:
an HTTP server that answers the requests of `create_repo` and `upload_folder` and keeps what it receives."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.utils import hub as transformers_hub

from dlite_hf import DLiteForDrafting
from dlite_hf.commands.card import CardArguments, main
from dlite_hf.model_card import create_model_card
from dlite_hf.publishing import push_drafter
from dlite_hf.training_record import TrainingRecord

from .evaluation.reports import measurement, report, row
from .test_model_card import save_drafter
from .test_training_record import make_run


REPO_ID = "me/tiny-DLite"


class HubHandler(BaseHTTPRequestHandler):
    """Stores files by name in `server.files`, and the creations of repositories and branches as they were asked."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path, hub = urlsplit(self.path).path, self.server
        hub.paths.append(path)
        hub.tokens.add(self.headers.get("Authorization"))
        if path == "/api/repos/create":
            hub.repo = json.loads(body)
            self.answer({"url": f"{hub.url}/{hub.repo.get('organization') or 'me'}/{hub.repo['name']}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path.startswith(f"/api/models/{REPO_ID}/branch/"):
            self.answer({})
        elif path.startswith(f"/api/models/{REPO_ID}/preupload/"):
            self.answer({"files": [self.upload_mode(each["path"]) for each in json.loads(body)["files"]]})
        elif path == f"/{REPO_ID}.git/info/lfs/objects/batch":
            self.answer({"objects": [self.upload_action(each) for each in json.loads(body)["objects"]]})
        elif path.startswith(f"/api/models/{REPO_ID}/commit/"):
            self.commit([json.loads(line) for line in body.splitlines()])
            self.answer({"commitUrl": f"{hub.url}/{REPO_ID}/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self.answer({}, status=404)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_GET(self):
        self.server.paths.append(urlsplit(self.path).path)
        self.answer({}, status=404, headers={"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def upload_mode(self, name):
        mode = "lfs" if name.endswith(".safetensors") else "regular"
        return {"path": name, "uploadMode": mode, "shouldIgnore": False}

    def upload_action(self, each):
        return {**each, "actions": {"upload": {"href": f"{self.server.url}/objects/{each['oid']}"}}}

    def commit(self, lines):
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.objects[value["oid"]]
            else:
                self.server.message = value["summary"]

    def answer(self, content, status=200, headers=()):
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Type": "application/json", "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    """The stand-in, which `huggingface_hub` takes for the Hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.files, server.objects, server.paths, server.tokens, server.repo = {}, {}, [], set(), None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(transformers_hub, "_hf_api", None)  # it keeps the endpoint of its first use
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()
    yield server
    huggingface_hub.close_session()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    """A drafter that can be published."""
    folder = tmp_path / "tiny-DLite"
    save_drafter(folder)
    TrainingRecord([make_run()]).save(folder)
    create_model_card(folder, repo_id=REPO_ID, license="mit").save(folder / "README.md")
    return folder


def read_files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_what_arrives_is_the_folder(hub, folder):
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "CACHEDIR.TAG").write_text("of a download")
    commit = push_drafter(folder, REPO_ID, private=True, token="hf_mine", commit_message="First")
    assert hub.files == read_files(folder)
    assert set(hub.files) == {"config.json", "model.safetensors", "README.md", "training_record.json"}
    assert hub.repo == {"name": "tiny-DLite", "organization": "me", "visibility": "private"} and hub.message == "First"
    assert hub.tokens == {"Bearer hf_mine"} and commit.oid == "0" * 40
    assert f"/api/models/{REPO_ID}/commit/main" in hub.paths


def test_a_revision_is_a_branch(hub, folder):
    push_drafter(folder, REPO_ID, revision="next")
    assert f"/api/models/{REPO_ID}/branch/next" in hub.paths and f"/api/models/{REPO_ID}/commit/next" in hub.paths
    assert hub.files == read_files(folder) and "visibility" not in hub.repo


def test_a_reduced_draft_vocabulary_belongs_to_a_drafter(hub, folder):
    drafter = DLiteForDrafting.from_pretrained(folder)
    drafter.reduce_draft_vocabulary(range(40))
    drafter.save_pretrained(folder)
    push_drafter(folder, REPO_ID)
    assert hub.files == read_files(folder)


def _add_target_weights(folder):
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{f"model.layers.{i}.weight": torch.zeros(1) for i in range(5)}}, file)


def _drop_a_weight(folder):
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "norm.weight"}, file)


def _cut_a_weight(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "norm.weight": weights["norm.weight"][:5].clone()}, file)


def _replace(name, old, new):
    def change(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "README.md").unlink(), "README.md is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "optimizer.pt").touch(), "optimizer.pt does not belong to a drafter"),
        (lambda folder: (folder / "training_args.bin").touch(), "training_args.bin does not belong to a drafter"),
        (
            lambda folder: (folder / "checkpoint-1").mkdir() or (folder / "checkpoint-1/x").touch(),
            "checkpoint-1/x does",
        ),
        (_add_target_weights, r"no drafter's: model.layers.0.weight, .* and 2 more"),
        (_drop_a_weight, "lacks norm.weight"),
        (_cut_a_weight, r"other shapes: norm.weight \(\[5\] instead of \[32\]\)"),
        (_replace("README.md", "license: mit\n", ""), "README.md states no license"),
        (_replace("README.md", "- dlite\n", ""), "README.md lacks the tag 'dlite'"),
        (_replace("README.md", "relation: adapter", "relation: finetune"), "base_model_relation 'finetune'"),
        (_replace("README.md", "base_model: owner/target", "base_model: a/b/c"), "metadata of README.md are invalid"),
        (_replace("README.md", "license: mit", "license: [mit"), "metadata of README.md are invalid"),
        (_replace("README.md", "license: mit", "datasets: [a b]"), "metadata of README.md are invalid"),
        (_replace("config.json", "owner/target", "/home/jane/target"), "'owner/target', but .* ends in 'target'"),
        (_replace("training_record.json", '"seed"', '"speed"'), "is no training record"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_sent(hub, folder, change, message):
    change(folder)
    with pytest.raises(ValueError, match=message) as raised:
        push_drafter(folder, REPO_ID)
    assert hub.paths == [] and "jane" not in str(raised.value)
    if "is no training record" not in message:
        assert "`dlite-hf card --drafter tiny-DLite`" in str(raised.value)


def run_command(*words):
    (args,) = HfArgumentParser(CardArguments).parse_args_into_dataclasses([str(word) for word in words])
    main(args)


def test_command_writes_the_card_again_and_again(folder):
    run_command("--drafter", folder, "--license", "mit")
    run_command("--drafter", folder, "--license", "apache-2.0", "--datasets", "a/b", "c/d", "--language", "en")
    data = ModelCard.load(folder / "README.md").data
    assert (data.license, data.datasets, data.language) == ("apache-2.0", ["a/b", "c/d"], "en")


def test_command_says_what_it_was_not_given(folder, tmp_path, capsys):
    run_command("--drafter", folder)
    assert "neither tau nor speed was measured; `--evaluations" in capsys.readouterr().out
    file = tmp_path / "report.json"
    report([row(dlite=measurement(rounds=4, emitted=10))], checkpoint=folder.name).save(file)
    run_command("--drafter", folder, "--evaluations", file)
    assert "neither tau nor speed was measured" not in capsys.readouterr().out
    assert "No evaluation" not in (folder / "README.md").read_text()


def test_command_keeps_what_somebody_wrote(folder):
    (folder / "README.md").write_text("by hand")
    with pytest.raises(ValueError, match="pass `--overwrite`"):
        run_command("--drafter", folder)
    assert (folder / "README.md").read_text() == "by hand"
    run_command("--drafter", folder, "--overwrite")
    assert "by hand" not in (folder / "README.md").read_text()


def test_command_pushes(hub, folder, capsys):
    run_command("--drafter", folder, "--repo_id", REPO_ID, "--license", "mit", "--push", "--private")
    assert hub.files == read_files(folder) and hub.repo["visibility"] == "private"
    assert f"Uploaded to {hub.url}/{REPO_ID}/commit/" in capsys.readouterr().out


@pytest.mark.parametrize("named", ["folder", "/home/jane/target", None])
def test_command_publishes_a_drafter_of_a_local_target(hub, folder, tmp_path, named):
    named = str(tmp_path) if named == "folder" else named
    before = json.loads((folder / "config.json").read_text())
    assert before.pop("target_name_or_path") == "owner/target"
    (folder / "config.json").write_text(json.dumps({**before, "target_name_or_path": named}))
    push = ["--drafter", folder, "--repo_id", REPO_ID, "--license", "mit", "--push"]
    with pytest.raises(ValueError, match="pass `base_model`") as raised:
        run_command(*push)
    assert "jane" not in str(raised.value)
    run_command(*push, "--base_model", "owner/named")
    after = json.loads(hub.files["config.json"])
    assert after.pop("target_name_or_path") == "owner/named" and after == before
    assert b"base_model: owner/named\n" in hub.files["README.md"]


def test_command_leaves_another_id_as_it_is(hub, folder):
    before = (folder / "config.json").read_bytes()
    push = ["--drafter", folder, "--repo_id", REPO_ID, "--license", "mit", "--push"]
    with pytest.raises(ValueError, match="states the target 'owner/other'"):
        run_command(*push, "--base_model", "owner/other")
    assert (folder / "config.json").read_bytes() == before and hub.paths == []


@pytest.mark.parametrize(("words", "message"), [(["--push"], "`--repo_id owner/name`"), (["--private"], "`--push`")])
def test_command_refuses_halves(folder, words, message):
    before = read_files(folder)
    with pytest.raises(ValueError, match=message):
        run_command("--drafter", folder, *words)
    assert read_files(folder) == before


def test_the_models_own_push(hub, tmp_path):
    drafter = save_drafter(tmp_path)
    drafter.push_to_hub(REPO_ID)
    assert f"/{REPO_ID}/resolve/main/README.md" in hub.paths  # it looks for a card that is there
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md"}
    assert hub.files["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()


def test_the_trainers_own_push(hub, tmp_path):
    drafter = save_drafter(tmp_path / "saved")
    args = TrainingArguments(tmp_path / "outputs", hub_model_id=REPO_ID, report_to="none", use_cpu=True)
    Trainer(drafter, args).push_to_hub()
    assert hub.files["model.safetensors"] == (tmp_path / "saved" / "model.safetensors").read_bytes()
    assert "config.json" in hub.files and "README.md" in hub.files
