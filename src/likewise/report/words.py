"""What the page calls each column, with one line that explains it: the words of a colleague, not of a kernel."""

from typing import NamedTuple


class Word(NamedTuple):
    """A column, or another term, as the page shows it."""

    title: str
    meaning: str


WORDS = {
    "sample": Word("number", "Position in the data set, counted from 0."),
    "name": Word("name", "File or name of the sample."),
    "label": Word("label", "The label that came with the data."),
    "prediction": Word("prediction", "What the network says."),
    "log_likelihood": Word(
        "log-likelihood",
        "Of the text, by the language model: the mean over its tokens, or their sum where the readout says so. Nearer "
        "to 0: the model expects such a text.",
    ),
    "error": Word("error", "Distance of the prediction from the label."),
    "density": Word(
        "mean similarity",
        "Mean similarity to all samples (soft neighbors over samples, N_S / N): large for ordinary samples, small for "
        "rare ones.",
    ),
    "local_density": Word(
        "local density",
        "How many samples are close to it, itself included: similarities to the fourth power, summed. Near 1, it is "
        "alone.",
    ),
    "hard_neighbors": Word(
        "similar samples",
        "How many samples, itself included, are at least as similar to it as the slider above the table says.",
    ),
    "duplicates": Word("duplicate pairs", "In how many pairs of near-duplicates it is."),
    "novelty": Word(
        "novelty",
        "The share of the samples that are less unusual, by gradients, features and their length: near 1 for what is "
        "unlike the rest.",
    ),
    "gradient_novelty": Word(
        "novelty by gradients", "1 − mean similarity to the ten most similar samples, by gradients."
    ),
    "feature_novelty": Word(
        "novelty by features",
        "1 − mean similarity to the ten most similar samples, by what the last layer sees.",
    ),
    "feature_length": Word(
        "length of features", "Of what the last layer sees: much longer or shorter ones are unusual."
    ),
    "energy": Word("energy", "−log Σ exp of the outputs: large where the network finds no class likely."),
    "uncertainty": Word(
        "uncertainty",
        "How little the other samples constrain what the network says of it: large where that rests on few. Compare "
        "within a run only.",
    ),
    "shift": Word(
        "prediction gap",
        "How far its prediction is from the mean prediction of similar samples. For classes, 0 is the same and 1 "
        "another class; numbers are in units of the labels' spread.",
    ),
    "agreement": Word(
        "neighbor agreement",
        "Share of the similar samples, weighted by similarity, whose label is the predicted class; for numbers, how "
        "near their mean label is, from 0 to 1.",
    ),
    "status": Word(
        "neighborhood",
        "Typical: similar samples share its label. Neighbors disagree: they carry another. Few neighbors: "
        "nothing to judge by. Where reheated copies or networks that have not seen it judge labels, these agree or "
        "disagree.",
    ),
    "label_suspicion": Word(
        "label suspicion",
        "How strongly similar samples and the network contradict the label, from 0 to 1. It ranks; it is no "
        "probability.",
    ),
    "suggested_label": Word(
        "suggested label",
        "What the sample looks like: the label that similar samples and the network support; where reheated copies or "
        "networks that have not seen it judge, the label that these say.",
    ),
    "suggestion_support": Word(
        "support of the suggestion",
        "Share of the opinion of reheated copies, or of networks that have not seen it, that is for the suggested "
        "label. Below one half, a suggestion is doubtful.",
    ),
    "label_issue": Word(
        "looks wrong",
        "Flagged for review: of all labels, similar samples and the network contradict these most. Others may be wrong "
        "too; suspicion ranks them all.",
    ),
    "chance_wrong": Word(
        "probability wrong",
        "Estimated probability that the label is wrong. Too high where classes overlap, and for rare samples.",
    ),
    "target_suspicion": Word(
        "target suspicion",
        "How strongly similar samples and the network contradict a number, or one of several labels.",
    ),
    "suspicious_class": Word(
        "suspicious label",
        "Of several labels of a sample, the one that looks wrong most.",
    ),
    "margin": Word(
        "training margin",
        "How clearly the network preferred the label, on average over training; negative: it mostly did not.",
    ),
    "training_confidence": Word(
        "training confidence",
        "Mean probability of the label over training: near 0, the network never believed it.",
    ),
    "training_variability": Word(
        "training variability",
        "How much that probability moved over training: large for ambiguous samples.",
    ),
    "forgetting": Word(
        "forgetting events",
        "How often training went from right to wrong on it. One that was never learned counts as 0.",
    ),
    "similarity": Word(
        "similar",
        "Two samples are similar if a training step on one changes the network's output for the other in the same way "
        "(cosine of their gradients). 1: the same; 0: nothing in common beyond what all samples share.",
    ),
    "learned": Word("accuracy", "Share of the labels that the network itself predicts."),
    "supported": Word(
        "leave-one-out accuracy",
        "Share of the labels that the most similar other samples predict. Much less than the network's accuracy: "
        "expect a drop on new data. The votes that judge labels weigh all samples, so their share differs a little.",
    ),
    "duplicate": Word(
        "near-duplicates",
        "Pairs that are far more similar than is usual (in their class, if there are classes), by the network or by "
        "their inputs. Look before you drop one.",
    ),
    "spot_check": Word(
        "spot check",
        "Labels drawn at random from all of the ranking: what you decide about them estimates how many labels "
        "are wrong, with a 95 % interval.",
    ),
    "passage": Word(
        "plain similarity of two texts",
        "Of a language model: how far a step on one text raises the likelihood of the other, −1 to 1. It is a sum over "
        "tokens, which are marked by their terms. The number that neighbors are ordered by is centered: less what all "
        "texts share.",
    ),
    "map": Word(
        "map",
        "Near points are similar to the network. Distances between groups, and directions, mean little.",
    ),
}
STATUSES = {
    "ordinary": Word("typical", "similar samples share its label"),
    "contested": Word("neighbors disagree", "similar samples carry another label"),
    "isolated": Word("few neighbors", "too few similar samples to judge by"),
}
STATUSES_BY_JUDGE = {  # where others than similar samples judge labels: likewise.report.suggestions.suggestion_judge
    "reheated": {
        "ordinary": Word("typical", "reheated copies of the network say its label"),
        "contested": Word("copies disagree", "reheated copies of the network say another label"),
    },
    "crossval": {
        "ordinary": Word("typical", "networks that have not seen it say its label"),
        "contested": Word("other networks disagree", "networks that have not seen it say another label"),
    },
}


def status_words(judge: str) -> dict[str, Word]:
    """Return what statuses mean where labels are judged so."""
    return STATUSES | STATUSES_BY_JUDGE.get(judge, {})
