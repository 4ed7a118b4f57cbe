"""FiftyOne: images with their labels, what neighbors suggest, mistakenness and uniqueness.

fiftyone.Dataset.from_dir("fiftyone", dataset_type=fiftyone.types.FiftyOneDataset)
"""

import json
from pathlib import Path
from typing import Any

from likewise import files
from likewise.runs.result import Analysis
from likewise.thumbnails import media_type


def write_fiftyone(folder: Path, found: Analysis) -> None:
    """Write samples.json, metadata.json and the thumbnails into a folder; samples without a picture are left out."""
    images = {i: picture.content for i, picture in found.pictures.items() if picture.kind == "image"}
    if not images:
        raise ValueError(f"FiftyOne shows images, and the run in {found.folder} has none.")
    files.make_folder(folder / "data")
    for i, content in images.items():
        files.write_bytes(folder / _address(i, content), content)
    samples = [_sample(found, i, _address(i, images[i])) for i in sorted(images)]
    files.write_text(folder / "samples.json", json.dumps({"samples": samples}, ensure_ascii=False))
    about = {"info": {"likewise": found.manifest["versions"]["likewise"], "run": found.manifest["data"]}}
    files.write_text(folder / "metadata.json", json.dumps(about, indent=1))


def _address(i: int, image: bytes) -> str:
    """Return where the thumbnail of a sample is, in the folder."""
    return f"data/{i}.{media_type(image).removeprefix('image/')}"


def _sample(found: Analysis, i: int, address: str) -> dict[str, Any]:
    """Return a sample: mistakenness and uniqueness grow as FiftyOne's own do, from 0 to 1."""
    row, table, classes = found.table.iloc[i], found.table, found.manifest.get("classes") or []
    sample: dict[str, Any] = {
        "filepath": address,
        "tags": ["label_issue"] if bool(row.get("label_issue", False)) else [],
        "sample_number": i,
        "uniqueness": min(1.0, max(0.0, float(row["novelty"]))),
    }
    if "name" in table:
        sample["name"] = str(row["name"])
    for column, field in (("label", "ground_truth"), ("prediction", "prediction")):
        if column in table and classes and table[column].dtype.kind in "iu":
            sample[field] = {"_cls": "Classification", "label": classes[int(row[column])]}
    if "suggested_label" in table:
        chance = float(row["chance_wrong"])
        suspicion = float(row["label_suspicion"])
        sample["suggested"] = {
            "_cls": "Classification",
            "label": classes[int(row["suggested_label"])],
            "confidence": suspicion if chance != chance else chance,
        }
        sample["mistakenness"] = suspicion
    return sample
