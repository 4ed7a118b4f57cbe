"""The first screen in words: right numbers, nothing promised that one network cannot tell."""

import numpy as np
from synthetic import synthetic_run

from likewise.report.pages import page
from likewise.report.verdict import standing_group, steps, verdict

UNKNOWN = {
    "errors": None,
    "precision": None,
    "distinct": False,
    "reason": "Wrong ones may be memorized. Reheat it.",
}


def run_with(told=None, **columns):
    run = synthetic_run(200, pictures=0)
    manifest = {**run.manifest, **({} if told is None else {"wrong_labels": told})}
    return run._replace(manifest=manifest, columns={**run.columns, **columns})


def words(run):
    said = verdict(run)
    return " ".join([said.headline, said.detail, *(part for caveat in said.caveats for part in caveat)])


def test_where_one_network_cannot_tell_the_report_says_so_and_what_to_do():
    for flagged in (np.zeros(200, bool), np.ones(200, bool)):
        text = words(run_with(UNKNOWN, label_issue=flagged))
        assert "One network cannot tell how many" in text
        assert "Reheat it" in text
        assert "None of" not in text and "seem to be wrong" not in text


def test_where_it_can_tell_the_numbers_are_there():
    told = {"errors": [3, 5, 9], "precision": [0.5, 0.8, 0.9], "distinct": True, "reason": ""}
    text = words(run_with(told))
    assert "10 of 200 labels look wrong" in text and "about 5 labels seem to be wrong (3 to 9)" in text
    assert "Of the 10 that look wrong, about 80\u00a0% (50 to 90\u00a0%) really are." in text
    text = words(run_with({**told, "distinct": False}))
    assert "worth a look" in text and "about 9 at most" in text and "80" not in text
    hot = run_with({**told, "distinct": False})
    hot.manifest["reheated"] = "Reheated 4 times."
    assert "Reheated copies of the network contradict them" in words(hot) and "Similar samples" not in words(
        hot
    )
    wide = words(run_with({**told, "precision": [0.25, 0.95, 0.99]}))
    assert "Of the 10 that look wrong, between 25 and 99\u00a0% really are." in wide and "95" not in wide
    assert "None of 200 labels stands out" in words(run_with(told, label_issue=np.zeros(200, bool)))


def test_the_command_names_the_run_folder_as_a_shell_reads_it():
    run = synthetic_run(20, pictures=0)
    assert run._replace(folder="my run").command == "likewise apply 'my run' decisions.json"


def test_the_group_that_stands_out_is_named():
    label, flagged = np.arange(200) % 10, np.zeros(200, bool)
    flagged[label == 3] = True
    flagged[:4] = True
    look = np.where(flagged, 5, label)
    run = run_with(label=label, suggested_label=look, label_issue=flagged)
    assert standing_group(run) == "20 of them are labeled class D and look like class F."
    assert "labeled class D and look like class F" in words(run)
    spread = np.arange(200) % 11 == 0
    spread_look = np.where(spread, (label + 1 + np.arange(200) % 7) % 10, label)
    run = run_with(label=label, suggested_label=spread_look, label_issue=spread)
    assert standing_group(run) == ""
    camera = np.where(spread, "old", "new").astype(object)
    run = run_with(label=label, suggested_label=spread_look, label_issue=spread, camera=camera)
    assert standing_group(run) == f"{spread.sum()} of them have camera old."


def test_steps_count_what_they_open_and_leave_out_what_is_not_there():
    run = run_with()
    found = {step.title: step for step in steps(run)}
    assert found["labels to review"].value == "10"
    others = (run.columns["shift"] > 0.5) & ~run.columns["label_issue"]
    assert found["predictions to check"].value == str(others.sum())
    assert not any("label or collect" in title for title in found)
    alone = np.where(np.arange(200) < 7, "isolated", "ordinary").astype(object)
    found = {step.title: step for step in steps(run_with(status=alone))}
    assert found["samples to label or collect next"].value == "7"
    pairs = {name: np.arange(3) for name in ("first", "second", "similarity", "input_similarity")}
    found = {step.title: step for step in steps(run._replace(duplicates=pairs))}
    assert found["near-duplicate pairs"].value == "3"


def test_the_most_confused_classes_are_predicted_as_each_other():
    label = np.arange(200) % 10
    said = label.copy()
    said[[3, 13, 23]], said[[7, 17]], said[[1, 11, 21]] = 7, 3, 2
    quiet = np.zeros(200, dtype=bool)
    run = run_with(label=label, prediction=said, suggested_label=label, label_issue=quiet)
    step = {step.title: step for step in steps(run)}["are confused most"]
    classes = run.manifest["classes"]
    assert step.value == f"{classes[3]} · {classes[7]}"
    assert "12\u00a0% of their samples are predicted as the other class" in step.text  # 5 of 40
    flagged = np.isin(np.arange(200), [3, 13, 7, 17])
    run = run_with(label=label, prediction=said, suggested_label=label, label_issue=flagged)
    step = {step.title: step for step in steps(run)}["are confused most"]
    assert step.value == f"{classes[1]} · {classes[2]}"


def test_a_class_that_is_mostly_predicted_as_another_is_named():
    label = np.arange(200) % 10
    missed = np.where((label == 3) & (np.arange(200) % 4 == 1), 7, np.where(label == 3, 5, label))
    quiet = np.zeros(200, dtype=bool)
    found = {step.title: step for step in steps(run_with(label=label, prediction=missed, label_issue=quiet))}
    step = found["is the class to collect more of"]
    assert step.value == run_with().manifest["classes"][3]
    assert "100\u00a0% of its samples" in step.text
    half = np.where(np.arange(200) < 100, missed, label)
    found = {step.title: step for step in steps(run_with(label=label, prediction=half, label_issue=quiet))}
    assert "is the class to collect more of" not in found


def test_the_card_of_the_fit_tells_the_accuracy_of_each_split():
    label = np.arange(200) % 10
    said = np.where(np.arange(200) < 30, (label + 1) % 10, label)
    fit = {"verdict": "underfit", "learned": 0.85, "supported": 0.8}
    run = run_with(label=label, prediction=said)
    run = run._replace(manifest={**run.manifest, "fit": fit})
    split = np.where(np.arange(200) < 100, "train", "val").astype(object)
    for columns, text in (
        ({**run.columns, "split": split}, "Accuracy by split: train 70\u00a0%, val 100\u00a0%."),
        (
            {k: v for k, v in run.columns.items() if k != "split"},
            "if the network was trained on these samples",
        ),
    ):
        step = {s.title: s for s in steps(run._replace(columns=columns))}["accuracy · leave-one-out accuracy"]
        assert text in step.text


def run_of_texts(pairs=0):
    """Return a run as of a language model: log-likelihoods, no classes, no labels."""
    run = synthetic_run(200, pictures=0)
    kept = ("sample", "density", "local_density", "uncertainty", "duplicates", "novelty", "map_x", "map_y")
    columns = {name: run.columns[name] for name in kept} | {"log_likelihood": np.linspace(-5, -1, 200)}
    manifest = {**run.manifest, "classes": None, "own_columns": [], "fit": None}
    for name in ("wrong_labels", "spot_check", "class_similarity"):
        manifest.pop(name)
    ends = np.arange(pairs)
    found = {"first": ends, "second": ends + 1, "similarity": ends * 0.0, "input_similarity": ends * 0.0}
    return run._replace(manifest=manifest, columns=columns, duplicates=found)


def test_of_texts_nothing_is_said_of_predictions_labels_or_classes():
    for pairs, headline in (
        (0, "200 texts, no near-duplicate pairs."),
        (1, "200 texts, 1 near-duplicate pair."),
    ):
        run = run_of_texts(pairs)
        assert verdict(run).headline == headline and verdict(run).worst == "Most novel texts"
        said = words(run) + " ".join(f"{step.title} {step.text}" for step in steps(run))
        assert len(steps(run)) == pairs
        assert not any(word in said for word in ("predict", "label", "class", "Do not act"))
    html = page(run_of_texts(1))
    text = html[html.index("<body>") : html.index('id="data"')]
    assert "predict" not in text and "accuracy" not in text and "in their class;" not in text
    assert "log-likelihood <code>log_likelihood</code>" in text and "1 thread of" in text
