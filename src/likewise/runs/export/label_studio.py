"""Label Studio: suspects as tasks with predictions, and decisions from its JSON export.

Create a project with config.xml as its labeling interface, and import tasks.json.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from likewise import files
from likewise.runs.export.suspects import Suspect, Suspects, decide_answers
from likewise.runs.result import Analysis
from likewise.runs.review import Decision
from likewise.version import VERSION

CONTROL, OBJECT = "label", "sample"


def write_tasks(folder: Path, suspects: Suspects) -> None:
    """Write tasks.json and config.xml into a folder."""
    files.make_folder(folder)
    tasks = [_task(suspect, suspects) for suspect in suspects.samples]
    files.write_text(folder / "tasks.json", json.dumps(tasks, indent=1, ensure_ascii=False))
    files.write_text(folder / "config.xml", _config(suspects))


def is_export(found: Any) -> bool:
    """Whether a parsed JSON file is an export of Label Studio."""
    return isinstance(found, list) and all(isinstance(t, Mapping) and "annotations" in t for t in found)


def read_annotations(run: Analysis, found: list[Any], source: str) -> list[Decision]:
    """Return the decisions in an export of Label Studio, form JSON; tasks that were skipped tell nothing."""
    return decide_answers(run.decision_reader, run, _answers(found, source), source)


def _answers(found: list[Any], source: str) -> Iterator[tuple[Any, Any, list[str]]]:
    for task in found:
        data = task.get("data") or {}
        if "run" not in data or "sample" not in data:
            raise ValueError(
                f"{source} has a task without run and sample: these are not the tasks that likewise export wrote."
            )
        given = [annotation for annotation in task["annotations"] if not annotation.get("was_cancelled")]
        chosen = [
            str(choice)
            for annotation in given
            for region in annotation.get("result", [])
            if region.get("from_name") == CONTROL
            for choice in region["value"]["choices"]
        ]
        yield data["run"], data["sample"], chosen


def _task(suspect: Suspect, suspects: Suspects) -> dict[str, Any]:
    shown = {"image": suspect.image} if suspects.shows_images else {"text": suspect.text}
    choice = {
        "id": f"likewise-{suspect.sample}",
        "from_name": CONTROL,
        "to_name": OBJECT,
        "type": "choices",
        "value": {"choices": [suspect.suggested]},
    }
    return {
        "data": {
            **shown,
            "question": f"labeled {suspect.label}, looks like {suspect.suggested}: what is it?",
            "name": suspect.name,
            "label": suspect.label,
            "suggested_label": suspect.suggested,
            "label_suspicion": round(suspect.suspicion, 6),
            "sample": suspect.sample,
            "run": suspects.run.manifest["data"],
        },
        "predictions": [
            {
                "model_version": f"likewise {VERSION}",
                "score": round(suspect.confidence, 6),
                "result": [choice],
            }
        ],
    }


def _config(suspects: Suspects) -> str:
    """Return the labeling interface: the sample, the question, and the answers."""
    view = ElementTree.Element("View")
    ElementTree.SubElement(view, "Header", value="$question")
    if suspects.shows_images:
        ElementTree.SubElement(view, "Image", name=OBJECT, value="$image", zoom="true")
    else:
        ElementTree.SubElement(view, "Text", name=OBJECT, value="$text")
    choices = ElementTree.SubElement(
        view, "Choices", name=CONTROL, toName=OBJECT, choice="single", required="true", showInline="true"
    )
    for answer in suspects.answers:
        ElementTree.SubElement(choices, "Choice", value=answer)
    ElementTree.indent(view)
    return ElementTree.tostring(view, encoding="unicode") + "\n"
