"""A sample of benchmarks/zoo.py: published architectures against a plain autograd loop."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from zoo import table
from zoo.hugging_face import transformers_cases
from zoo.measurement import measure

ROOT = Path(__file__).parents[1]
CASES = {case.family: case for case in transformers_cases()}
SAMPLE = ["albert", "convbert", "gpt2", "llama", "mamba", "t5", "resnet", "vit"]


@pytest.mark.parametrize("name", SAMPLE)
def test_published_architectures_are_right_at_full_speed(name):
    record = measure(CASES[name])
    assert table.status(record) == "full speed", record
    assert record["spread"] > 1e-3  # similarities that differ
    assert record["float64"]["error"] < 1e-9
    assert record["float32"]["error"] < 1e-5


def test_the_page_holds_the_results():
    results = (ROOT / "benchmarks" / "results" / "zoo.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["key"]: record for record in map(json.loads, results)}
    text = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
    written = text.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert written == table.build_tables(list(records.values()))
    assert not [key for key, record in records.items() if table.status(record) == "wrong"]
