"""Argilla: suspects as records with suggestions, and decisions from its JSON export.

The folder is what `argilla.Dataset.from_disk(folder)` reads; `dataset.records.to_json(path)` writes what comes back.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from likewise import files
from likewise.runs.export.suspects import Suspect, Suspects, decide_answers
from likewise.runs.result import Analysis
from likewise.runs.review import Decision

QUESTION = "label"
AGENT = "likewise"


def write_records(folder: Path, suspects: Suspects) -> None:
    """Write records, settings and the dataset's description into a folder."""
    files.make_folder(folder / ".argilla")
    settings = _settings(suspects)
    about = {
        "name": f"likewise-{suspects.run.manifest['data'][:12]}",
        "guidelines": settings["guidelines"],
        "allow_extra_metadata": False,
    }
    records = [_record(suspect, suspects) for suspect in suspects.samples]
    for name, content in (
        (".argilla/dataset.json", about),
        (".argilla/settings.json", settings),
        ("records.json", records),
    ):
        files.write_text(folder / name, json.dumps(content, indent=1, ensure_ascii=False))


def is_export(found: Any) -> bool:
    """Whether a parsed JSON file is an export of Argilla."""
    return isinstance(found, list) and all(isinstance(r, Mapping) and "responses" in r for r in found)


def read_responses(run: Analysis, found: list[Any], source: str) -> list[Decision]:
    """Return the decisions in records of Argilla; records without a response tell nothing."""
    return decide_answers(run.decision_reader, run, _answers(found, source), source)


def _answers(found: list[Any], source: str) -> Iterator[tuple[Any, Any, list[str]]]:
    for record in found:
        metadata = record.get("metadata") or {}
        if "run" not in metadata or "sample" not in metadata:
            raise ValueError(
                f"{source} has a record without run and sample: these are not the records that likewise export wrote."
            )
        responses = (record.get("responses") or {}).get(QUESTION) or []
        sample = metadata["sample"]
        number = int(sample) if isinstance(sample, float) and sample.is_integer() else sample
        yield metadata["run"], number, [str(response["value"]) for response in responses]


def _record(suspect: Suspect, suspects: Suspects) -> dict[str, Any]:
    shown = {"image": suspect.image} if suspects.shows_images else {"text": suspect.text}
    fingerprint = suspects.run.manifest["data"]
    return {
        "id": f"{fingerprint[:12]}-{suspect.sample}",
        "fields": shown,
        "metadata": {
            "sample": suspect.sample,
            "run": fingerprint,
            "name": suspect.name,
            "given_label": suspect.label,
            "suspicion": round(suspect.suspicion, 6),
        },
        "suggestions": {
            QUESTION: {"value": suspect.suggested, "score": round(suspect.confidence, 6), "agent": AGENT}
        },
        "responses": {},
        "vectors": {},
    }


def _settings(suspects: Suspects) -> dict[str, Any]:
    kind = "image" if suspects.shows_images else "text"
    shown: dict[str, Any] = {"type": kind} if kind == "image" else {"type": kind, "use_markdown": False}
    options = [{"value": answer, "text": answer} for answer in suspects.answers]
    return {
        "guidelines": "Each sample's label looks wrong to the network. Choose the class that it is; the one it has, "
        "under metadata, if that is right.",
        "fields": [{"name": kind, "title": "sample", "required": True, "settings": shown}],
        "questions": [
            {
                "name": QUESTION,
                "title": "What is it?",
                "required": True,
                "settings": {"type": "label_selection", "options": options, "visible_options": None},
            }
        ],
        "metadata": [
            {"name": name, "title": title, "settings": {"type": kind}, "visible_for_annotators": True}
            for name, title, kind in (
                ("sample", "number of the sample", "integer"),
                ("run", "fingerprint of the data", "terms"),
                ("name", "name of the sample", "terms"),
                ("given_label", "label that it has", "terms"),
                ("suspicion", "how suspicious that is", "float"),
            )
        ],
        "vectors": [],
        "allow_extra_metadata": False,
        "distribution": {"strategy": "overlap", "min_submitted": 1},
    }
