"""The receivers' own code reads what `likewise export` wrote: python receivers.py TOOL FOLDER.

label-studio and argilla also answer as a reviewer would, by decided.json, and write export.json in their own form.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def label_studio(folder):
    from label_studio_sdk.label_interface import LabelInterface

    interface = LabelInterface((folder / "config.xml").read_text(encoding="utf-8"))
    interface.validate()
    tasks, answers = read(folder / "tasks.json"), read(folder / "decided.json")
    for number, task in enumerate(tasks):
        assert interface.validate_task({"data": task["data"]}), task["data"]
        for prediction in task["predictions"]:
            errors = interface.validate_prediction(prediction, return_errors=True)
            assert errors == [], errors
        region = interface.create_regions({"label": answers[number]})[0]
        annotation = {"result": [region._dict()], "was_cancelled": False}
        assert interface.validate_annotation(annotation), annotation
        task["annotations"] = [annotation]
    (folder / "export.json").write_text(json.dumps(tasks))
    return len(tasks)


def argilla(folder):
    with account():
        import argilla as rg
        from argilla.records._io import JsonIO

        settings = rg.Settings.from_json(folder / ".argilla" / "settings.json")
        settings.validate()
        dataset = rg.Dataset(
            **{k: read(folder / ".argilla" / "dataset.json")[k] for k in ("name",)}, settings=settings
        )
        answers, records = read(folder / "decided.json"), []
        for record, answer in zip(read(folder / "records.json"), answers, strict=True):
            made = rg.Record.from_dict(record, dataset=dataset)
            made.api_model()  # what would be sent to the server, validated
            option = settings.questions["label"].labels
            assert answer in option and record["suggestions"]["label"]["value"] in option
            user = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
            made.responses.add(rg.Response("label", answer, user_id=user, status="submitted"))
            records.append(made)
        (folder / "export.json").unlink(missing_ok=True)
        JsonIO.to_json(records, folder / "export.json")
    return len(records)


def fiftyone(folder):
    os.environ["FIFTYONE_DO_NOT_TRACK"] = "true"
    import fiftyone as fo
    from fiftyone.utils.data.importers import LegacyFiftyOneDatasetImporter

    with LegacyFiftyOneDatasetImporter(
        str(folder)
    ) as importer:  # what from_dir uses; a database is not needed
        samples = list(importer)
    for sample in samples:
        assert isinstance(sample, fo.Sample) and Path(sample.filepath).is_file()
        assert isinstance(sample.ground_truth, fo.Classification) and 0 <= sample.mistakenness <= 1
        assert 0 <= sample.suggested.confidence <= 1 and 0 <= sample.uniqueness <= 1
    return len(samples)


def spotlight(folder):
    from renumics.spotlight.analysis import DataIssue
    from renumics.spotlight.data_source import create_datasource
    from renumics.spotlight.data_store import DataStore

    store = DataStore(create_datasource(folder / "samples.parquet"), {})
    kinds = {name: str(kind) for name, kind in store.dtypes.items()}
    assert kinds["label"] == kinds["suggested_label"] == "Category" and kinds["embedding"] == "Embedding", (
        kinds
    )
    assert kinds["image"] == "Image" and kinds["label_suspicion"] == "float", kinds
    issues = [DataIssue(**issue) for issue in read(folder / "issues.json")]
    assert all(row < len(store) for issue in issues for row in issue.rows)
    return len(store)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


class account:
    """A server that says who is logged in, and nothing else: Argilla's client asks for it before it does anything."""

    def __enter__(self):
        who = {
            "id": "3fa85f64-5717-4562-b3fc-2c963f66afa6",
            "username": "reviewer",
            "first_name": "r",
            "role": "owner",
            "inserted_at": "2024-01-01T00:00:00",
            "updated_at": "2024-01-01T00:00:00",
        }

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                content = json.dumps(who).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        os.environ |= {
            "ARGILLA_API_URL": f"http://127.0.0.1:{self.server.server_port}",
            "ARGILLA_API_KEY": "x",
        }
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            os.environ.pop(name, None)

    def __exit__(self, *_):
        self.server.shutdown()


TOOLS = {"label-studio": label_studio, "argilla": argilla, "fiftyone": fiftyone, "spotlight": spotlight}

if __name__ == "__main__":
    print(TOOLS[sys.argv[1]](Path(sys.argv[2])))
