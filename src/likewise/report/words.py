"""The page's title for each column and term, and one line that explains it in everyday words."""

from typing import NamedTuple


class Word(NamedTuple):
    """Title and explanation of a column or another term on the page."""

    title: str
    meaning: str


WORDS = {
    "sample": Word("number", "Position in the data set, counted from 0."),
    "name": Word("name", "File or name of the sample."),
    "label": Word("label", "The label that came with the data."),
    "prediction": Word("prediction", "What the network predicts."),
    "log_likelihood": Word(
        "log-likelihood",
        "The language model's log-likelihood of the text: the mean over its tokens, or the sum if the readout says so. "
        "Closer to 0: the model expects such a text.",
    ),
    "error": Word("error", "Distance of the prediction from the label."),
    "density": Word(
        "mean similarity",
        "Mean similarity to all samples (soft neighbors divided by the number of samples, N_S / N): large for ordinary "
        "samples, small for rare ones.",
    ),
    "local_density": Word(
        "local density",
        "How many samples are close to it, itself included: the sum of similarities to the fourth power. Near 1, it "
        "is alone.",
    ),
    "hard_neighbors": Word(
        "similar samples",
        "How many samples, itself included, have at least the similarity set by the slider above the table.",
    ),
    "duplicates": Word("duplicate pairs", "The number of near-duplicate pairs that contain it."),
    "novelty": Word(
        "novelty",
        "The share of samples that are less unusual, by gradients, features and their length: near 1 for a sample "
        "unlike the rest.",
    ),
    "gradient_novelty": Word(
        "novelty by gradients", "1 − mean similarity to the ten most similar samples, by gradients."
    ),
    "feature_novelty": Word(
        "novelty by features",
        "1 − mean similarity to the ten most similar samples, by the inputs of the last layer.",
    ),
    "feature_length": Word(
        "length of features",
        "The length of the last layer's input: much longer or shorter than the others is unusual.",
    ),
    "energy": Word("energy", "−log Σ exp of the outputs: large if the network finds no class likely."),
    "uncertainty": Word(
        "uncertainty",
        "How little the other samples constrain the network's output for it: large if that rests on few samples. "
        "Compare only within a run.",
    ),
    "shift": Word(
        "prediction gap",
        "How far its prediction is from the mean prediction of similar samples. For classes, 0 means the same class "
        "and 1 another one; for numbers, the unit is the spread of the labels.",
    ),
    "agreement": Word(
        "neighbor agreement",
        "The share of similar samples, weighted by similarity, whose label is the predicted class; for numbers, how "
        "close their mean label is, from 0 to 1.",
    ),
    "status": Word(
        "neighborhood",
        "Typical: similar samples share its label. Neighbors disagree: they have another label. Few neighbors: too few "
        "to judge by. If reheated copies or networks that have not seen it judge labels, they agree or disagree "
        "instead.",
    ),
    "label_suspicion": Word(
        "label suspicion",
        "How strongly similar samples and the network contradict the label, from 0 to 1. It ranks labels; it is not a "
        "probability.",
    ),
    "suggested_label": Word(
        "suggested label",
        "What the sample looks like: the label that similar samples and the network support. If reheated copies or "
        "networks that have not seen it judge labels, the label that they predict.",
    ),
    "suggestion_support": Word(
        "support of the suggestion",
        "How strongly reheated copies, or networks that have not seen it, support the suggested label, from 0 to 1. "
        "Below one half, a suggestion is doubtful.",
    ),
    "label_issue": Word(
        "looks wrong",
        "Flagged for review: similar samples and the network contradict these labels most. Others may be wrong too; "
        "label suspicion ranks all of them.",
    ),
    "chance_wrong": Word(
        "probability wrong",
        "The estimated probability that the label is wrong. It is too high where classes overlap and for rare samples.",
    ),
    "target_suspicion": Word(
        "target suspicion",
        "How strongly similar samples and the network contradict a number, or one of several labels.",
    ),
    "suspicious_class": Word(
        "suspicious label",
        "The label of the sample, if it has several, that looks most wrong.",
    ),
    "margin": Word(
        "training margin",
        "How clearly the network preferred the label, on average over training; negative if it mostly did not.",
    ),
    "training_confidence": Word(
        "training confidence",
        "The mean probability of the label over training; near 0, the network never believed it.",
    ),
    "training_variability": Word(
        "training variability",
        "How much the probability of the label varied over training: large for ambiguous samples.",
    ),
    "forgetting": Word(
        "forgetting events",
        "How often its prediction went from right to wrong during training; 0 if it was never learned.",
    ),
    "similarity": Word(
        "similar",
        "Two samples are similar if a training step on one changes the network's output for the other in the same way "
        "(cosine of their gradients). 1: treated the same; 0: nothing in common beyond what all samples share.",
    ),
    "learned": Word("accuracy", "The share of labels that the network itself predicts."),
    "supported": Word(
        "leave-one-out accuracy",
        "The share of labels that the most similar other samples predict. If it is much lower than the network's "
        "accuracy, expect a drop on new data. The votes that judge labels weigh all samples, so their share differs "
        "a little.",
    ),
    "duplicate": Word(
        "near-duplicates",
        "Pairs that are far more similar than usual (in their class, if there are classes), to the network or by their "
        "inputs. Look before you drop one.",
    ),
    "spot_check": Word(
        "spot check",
        "Labels drawn at random from the whole ranking. Your decisions on them estimate how many labels are wrong, "
        "with a 95 % interval.",
    ),
    "passage": Word(
        "plain similarity of two texts",
        "For language models: how much a training step on one text raises the likelihood of the other, from −1 to 1. "
        "It is a sum over tokens; each token is marked by its contribution. Neighbors are ordered by centered "
        "similarity, which subtracts what all texts share.",
    ),
    "map": Word(
        "map",
        "Points close together are similar to the network. Distances between groups, and directions, mean little.",
    ),
}
STATUSES = {
    "ordinary": Word("typical", "similar samples share its label"),
    "contested": Word("neighbors disagree", "similar samples have another label"),
    "isolated": Word("few neighbors", "too few similar samples to judge by"),
}
STATUSES_BY_JUDGE = {  # if similar samples do not judge labels: likewise.report.suggestions.suggestion_judge
    "reheated": {
        "ordinary": Word("typical", "reheated copies of the network predict its label"),
        "contested": Word("copies disagree", "reheated copies of the network predict another label"),
    },
    "crossval": {
        "ordinary": Word("typical", "networks that have not seen it predict its label"),
        "contested": Word("other networks disagree", "networks that have not seen it predict another label"),
    },
}


def status_words(judge: str) -> dict[str, Word]:
    """Return the title and meaning of each status for this judge of labels."""
    return STATUSES | STATUSES_BY_JUDGE.get(judge, {})
