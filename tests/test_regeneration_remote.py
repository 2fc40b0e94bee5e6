# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The remote backend, against a small server that speaks the OpenAI API."""

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dlite_hf.regeneration import regenerate
from dlite_hf.regeneration_backends import OpenAIBackend


class Server(ThreadingHTTPServer):
    """Answers with the last message's text, or with what the test's `reply(messages, body)` returns."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"
        self.bodies, self.headers = [], []
        self.reply = lambda text, body: message(text.upper())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.headers.append(self.headers)
        status, reply = 404, {"error": {"message": f"no {self.path}"}}
        if self.path == "/v1/chat/completions":
            status, reply = self.server.reply(body["messages"][-1]["content"], body)
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def message(content, finish_reason="stop", **more):
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": content, **more}}
    return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}


def failure(status, text):
    return status, {"error": {"message": text, "type": "an error", "code": status}}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, arguments, id="call_1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = [{"id": name, "messages": [user(name)]} for name in "abcdefgh"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def read(file):
    return {record["id"]: record for record in map(json.loads, file.read_text(encoding="utf-8").splitlines())}


def test_answers_settings_and_key(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    server.reply = lambda text, body: message(text.upper(), "length" if text == "b" else "stop")
    file = tmp_path / "answers.jsonl"
    backend = OpenAIBackend(
        "tiny",
        base_url=server.base_url,
        revision="abc",
        concurrency=3,
        temperature=0.7,
        max_tokens=5,
        extra_body={"top_k": 2},
        extra_headers={"X-Secret": "s3cret"},
    )
    counts = regenerate(backend, CONVERSATIONS, file)
    assert (counts.succeeded, counts.failed, counts.skipped) == (8, 0, 0)

    records = read(file)
    for name in "abcdefgh":
        assert records[name]["messages"] == [user(name), assistant(name.upper())]
        assert records[name]["finish_reasons"] == ["length" if name == "b" else "stop"]
    settings = {"temperature": 0.7, "max_tokens": 5, "top_k": 2}
    recorded = {"model": "tiny", "revision": "abc", "backend": "openai", **settings, "turns": "last"}
    assert records["a"]["generation"] == recorded and "s3cret" not in file.read_text()
    expected = [{"messages": [user(name)], "model": "tiny", **settings} for name in "abcdefgh"]
    assert sorted(server.bodies, key=lambda body: body["messages"][0]["content"]) == expected
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sesame"}
    assert {headers["X-Secret"] for headers in server.headers} == {"s3cret"}


def test_requests_run_at_once(server, tmp_path):
    # No request is answered before four are there.
    barrier = threading.Barrier(4, timeout=10)

    def reply(text, body):
        barrier.wait()
        return message(text)

    server.reply = reply
    backend = OpenAIBackend("tiny", base_url=server.base_url, concurrency=4, max_retries=0)
    assert regenerate(backend, CONVERSATIONS, tmp_path / "answers.jsonl").succeeded == 8


def test_tool_calls_and_reasoning_in_every_turn(server, tmp_path):
    replies = {
        "add 1 and 2": message(None, "tool_calls", tool_calls=[call("add", '{"x": 1, "y": "é"}')], reasoning="why"),
        "3": message("It is 3.", reasoning_content="I see"),
        "thanks": message("", tool_calls=[call("bye", "")]),
    }
    server.reply = lambda text, body: replies[text]
    messages = [user("add 1 and 2"), assistant("old"), {"role": "tool", "content": "3"}, assistant("older")]
    conversation = {"id": 1, "messages": [*messages, user("thanks")], "tools": TOOLS}
    file = tmp_path / "answers.jsonl"
    regenerate(OpenAIBackend("tiny", base_url=server.base_url), [conversation], file, turns="all")

    record = read(file)[1]
    expected = [
        user("add 1 and 2"),
        assistant("", reasoning_content="why", tool_calls=[call("add", {"x": 1, "y": "é"})]),
        {"role": "tool", "content": "3"},
        assistant("It is 3.", reasoning_content="I see"),
        user("thanks"),
        assistant("", tool_calls=[call("bye", {})]),
    ]
    assert record["messages"] == expected and record["finish_reasons"] == ["stop"] * 3
    assert record["tools"] == TOOLS and all(body["tools"] == TOOLS for body in server.bodies)
    # The API reads arguments as JSON.
    sent = server.bodies[-1]["messages"]
    assert sent[1]["tool_calls"] == [call("add", '{"x": 1, "y": "é"}')]
    assert sent[2:] == expected[2:5]


def test_a_tool_call_that_is_no_object_fails(server, tmp_path, transformers_log):
    broken = {"a": '{"x": ', "b": "[1]"}

    def reply(text, body):
        calls = [call("add", broken[text])] if text in broken else None
        return message(text, tool_calls=calls)

    server.reply = reply
    file = tmp_path / "answers.jsonl"
    counts = regenerate(OpenAIBackend("tiny", base_url=server.base_url), CONVERSATIONS, file)
    assert (counts.succeeded, counts.failed) == (6, 2) and set(read(file)) == set("cdefgh")
    assert "Conversation 'b' failed: ValueError: The arguments of a call of 'add' are no JSON object" in (
        transformers_log.text
    )


def test_a_failing_server_recovers_and_one_conversation_is_refused(server, tmp_path, transformers_log):
    tries = dict.fromkeys("abcdefgh", 0)

    def reply(text, body):
        tries[text] += 1
        if text == "c":
            return failure(400, "not this one")
        if text == "e" and tries["e"] <= 2:
            return failure(500, "busy")
        return message(text)

    server.reply = reply
    file = tmp_path / "answers.jsonl"
    backend = OpenAIBackend("tiny", base_url=server.base_url, max_retries=2)
    counts = regenerate(backend, CONVERSATIONS, file)
    assert (counts.succeeded, counts.failed, counts.skipped) == (7, 1, 0)
    assert tries == {**dict.fromkeys("abdfgh", 1), "c": 1, "e": 3} and set(read(file)) == set("abdefgh")
    assert "Conversation 'c' failed: BadRequestError" in transformers_log.text

    server.reply = lambda text, body: message(text)
    counts = regenerate(backend, CONVERSATIONS, file)
    assert (counts.succeeded, counts.failed, counts.resumed) == (8, 0, 7)
    assert [body["messages"][0]["content"] for body in server.bodies].count("a") == 1


@pytest.mark.parametrize(
    "text",
    [
        "This model's maximum context length is 8 tokens. However, you requested 9 tokens.",
        "The input (9 tokens) is longer than the model's context length (8 tokens).",
        "the request exceeds the available context size. try increasing it",
    ],
)
def test_what_is_too_long_for_the_server_is_skipped(text, server, tmp_path):
    server.reply = lambda content, body: failure(400, text) if content == "a" else message(content)
    counts = regenerate(OpenAIBackend("tiny", base_url=server.base_url), CONVERSATIONS, tmp_path / "answers.jsonl")
    assert (counts.succeeded, counts.failed, counts.skipped) == (7, 0, 1)


def test_an_answer_without_an_end_fails(server, tmp_path, transformers_log):
    server.reply = lambda text, body: message(text, "content_filter" if text == "a" else "stop")
    counts = regenerate(OpenAIBackend("tiny", base_url=server.base_url), CONVERSATIONS, tmp_path / "answers.jsonl")
    assert (counts.succeeded, counts.failed) == (7, 1)
    assert "finish_reason 'content_filter'" in transformers_log.text


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_every_request(status, server, tmp_path):
    server.reply = lambda text, body: failure(status, "who are you?")
    backend = OpenAIBackend("tiny", base_url=server.base_url, concurrency=1)
    with pytest.raises(ConnectionError, match="refuses every request: .*who are you"):
        regenerate(backend, CONVERSATIONS, tmp_path / "answers.jsonl")
    assert len(server.bodies) <= 2  # the second may have been on its way


def test_a_server_that_is_not_there(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(ConnectionError, match=f"{base_url} could not be reached 3 times in a row"):
            regenerate(
                OpenAIBackend("tiny", base_url=base_url, concurrency=2, max_retries=0),
                CONVERSATIONS,
                tmp_path / "answers.jsonl",
            )
        with pytest.raises(RuntimeError, match="None of 8 conversations was answered; the first, .*Connection error"):
            regenerate(
                OpenAIBackend("tiny", base_url=base_url, concurrency=8, max_retries=0),
                CONVERSATIONS,
                tmp_path / "answers.jsonl",
            )


def test_settings_of_the_remote_backend_are_checked(server, monkeypatch):
    with pytest.raises(TypeError, match=r"\['top_k'\] are no arguments of the client's.*`extra_body`"):
        OpenAIBackend("tiny", base_url=server.base_url, top_k=2)
    with pytest.raises(ValueError, match=r"drop \['n', 'stop'\]"):
        OpenAIBackend("tiny", base_url=server.base_url, n=2, stop=["\n"])
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"dlite-hf\[regenerate\]"):
        OpenAIBackend("tiny", base_url=server.base_url)
