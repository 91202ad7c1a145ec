"""`data = "hub"` through the real `datasets` library, against a stand-in for the hub's protocol."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="needs the extra hub"
)

REPOSITORY = "/datasets/THUDM/LongBench/"
LOAD = """
import json, sys
from dataclasses import asdict
from evalgate.errors import TaskDataError
from evalgate.task_data import load_rows
try:
    print(json.dumps([asdict(row) for row in load_rows(sys.argv[1], "hub")]))
except TaskDataError as exc:
    print(json.dumps({"error": str(exc)}))
"""


class Hub(BaseHTTPRequestHandler):
    """One data set of one file, `archive`: its description, its file list, ranges of its bytes."""

    archive = b""

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        files = [{"type": "file", "path": "data.zip", "size": len(self.archive), "oid": "0" * 40}]
        if self.path.startswith(f"{REPOSITORY}resolve/"):
            self.send_archive()
        elif "/paths-info/" in self.path or "/tree/" in self.path:
            self.send(200, json.dumps(files).encode())
        else:
            about = {"id": "THUDM/LongBench", "sha": "a" * 40, "private": False, "tags": []}
            siblings = [{"rfilename": "data.zip"}]
            self.send(200, json.dumps({**about, "siblings": siblings}).encode())

    do_HEAD = do_POST = do_GET  # noqa: N815 - the names that http.server looks for

    def send_archive(self):
        wanted = self.headers.get("Range")
        if wanted is None:
            self.send(200, self.archive, ETag='"e"')
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        part = self.archive[int(first) : int(last) + 1]
        span = f"bytes {first}-{last}/{len(self.archive)}"
        self.send(206, part, **{"ETag": '"e"', "Content-Range": span})

    def send(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        """Quiet."""


@pytest.fixture
def hub():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for subset in ("hotpotqa", "passage_retrieval_en"):
            # The public files carry more keys than are read.
            row = {"input": f"about {subset}?", "context": "c", "answers": ["Paragraph 3"]}
            more = {"_id": f"{subset}-1", "length": 9, "all_classes": None, "language": "en"}
            archive.writestr(f"data/{subset}.jsonl", json.dumps({**row, **more}) + "\n")
    handler = type("Hub", (Hub,), {"archive": packed.getvalue()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def load(task, endpoint, cache):
    """Rows, or the error, as a fresh process gets them: the library reads its settings once."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, task],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**env, "HF_HUB_DISABLE_TELEMETRY": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_tasks_own_file_is_read_out_of_the_published_archive(hub, tmp_path):
    (row,) = load("retrieval", hub, tmp_path)
    assert row["sample_id"] == "passage_retrieval_en-1"
    assert (row["input"], row["answers"]) == ("about passage_retrieval_en?", ["Paragraph 3"])


def test_an_unreachable_hub_names_the_file_to_save_and_the_key_to_set(tmp_path):
    answer = load("gov_report", "http://127.0.0.1:9", tmp_path)
    assert (
        "gov_report.jsonl::hf://datasets/THUDM/LongBench/data.zip cannot be reached"
        in (answer["error"])
    )
    assert "save LongBench's gov_report.jsonl and set data to that file" in answer["error"]
