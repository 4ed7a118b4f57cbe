"""The paper's statistics and a few more, each a few lines on a GramMatrix.

neighbors     the most similar samples, how many there are (soft, hard, positive), similarity of classes, votes
uncertainty   how freely a prediction can move, and what moves with it
denoising     how much label noise the neighborhood averages out
duplicates    pairs that are nearly the same, within a data set and across splits
fit           over- or underfit
label_issues  which labels look wrong; noise_rate: how many are; spot_check: how many by a few decisions
crossval      predictions of networks that have not seen a sample
reheat        a copy of a network, trained on until it forgets labels that only one sample supports
novelty       how unusual an input is, compared with the training data
reliability   agreement of the neighbors of a prediction, and how often such predictions are right
target_issues which targets look wrong that are no classes: several labels, values, masks, words
lipschitz     how far outputs can differ, from similarities
targets       labels, predictions and checks that they share
"""
