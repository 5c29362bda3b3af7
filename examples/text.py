"""A penalty for each word of a bag of words, where some words give the topic away only in old articles.

Four news sites write about three topics. In their old articles the name of a section tells the topic. Then the
sites were reorganised, and it does not any more. There are many old articles and few new ones. A classifier y is
fitted on the old articles, and the penalties x of all words serve its loss on the new ones.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

import fedbilevel as fb
from showing import bars, folder, tell, together

out = folder("text")


def table(*lines):
    return np.array([line.split() for line in lines])


TOPICS = table(
    "match team goal coach season player stadium league race medal training fans injury score",
    "recipe oven flour taste kitchen chef sugar dinner onion butter spice soup market bread",
    "rocket orbit planet telescope launch crew moon satellite gravity mission star probe comet engine",
)
SECTIONS = table("red green blue", "north south west", "alpha beta gamma", "mon wed fri")
COMMON = table("people year time day week city world group number story work money news report friend plan house")
draw = np.random.default_rng(0)


# The data: an article has two words of its topic, one of any topic, eight common ones, and its section.
def article(topic, site, new):
    section = SECTIONS[site][draw.integers(3) if new else topic]
    stray = draw.choice(TOPICS[draw.integers(3)])
    return " ".join([*draw.choice(TOPICS[topic], 2), stray, *draw.choice(COMMON[0], 8), section])


def articles(site, count, new):
    """Articles of a site, counted word by word, and their topics. Each site prefers one topic."""
    topics = draw.choice(3, count, p=np.roll([0.6, 0.2, 0.2], site))
    return bag.transform([article(topic, site, new) for topic in topics]).toarray(), topics


bag = CountVectorizer().fit([*TOPICS.flat, *SECTIONS.flat, *COMMON.flat])
words = bag.get_feature_names_out()
old, new, test = ([articles(i, n, late) for i in range(4)] for n, late in ((60, False), (15, True), (250, True)))
clients = fb.clients_from(list(zip(old, new, strict=True)))


# The problem: multinomial logistic regression, with a penalty between 0.003 and 0.503 for each word.
def penalties(x):
    return 0.003 + 0.5 * jax.nn.sigmoid(x)


def loss(y, batch):
    return batch.mean(optax.softmax_cross_entropy_with_integer_labels(batch.inputs @ y, batch.targets))


problem = fb.Problem(
    x=jnp.full(len(words), -4.0),  # all penalties start at 0.012
    y=jnp.zeros((len(words), 3)),
    lower=lambda x, y, batch: loss(y, batch) + 0.5 * penalties(x) @ jnp.sum(y**2, axis=1),
    upper=lambda x, y, batch: loss(y, batch),
    metrics=lambda x, y, batch: {"test_accuracy": batch.mean((batch.inputs @ y).argmax(-1) == batch.targets)},
)
steps = dict(alpha=1000.0, beta=0.8, lam=0.8, lower_steps=3, batch_zeta_local="full")
method = fb.AggITD(N=15, estimator="summed", participation=1.0, **steps)
judges = together(test)
result = fb.train(problem, clients, method, stop={"iterations": 25}, evaluate={"every": 5}, test=fb.Part(*judges))
found = penalties(result.x)
largest = np.argsort(-found)[:16]


# Beside it: one penalty for all words, the best of five for the test articles.
def accuracy(parts, use=slice(None)):
    a, b = together(parts)
    models = [LogisticRegression(C=C, fit_intercept=False, max_iter=2000) for C in (0.1, 0.3, 1, 3, 10)]
    return max(float(model.fit(a[:, use], b).score(judges[0][:, use], judges[1])) for model in models)


accuracies = {
    "bilevel": float(result.history[-1]["test_accuracy"]),
    "oracle, who leaves out the sections": accuracy(old, ~np.isin(words, SECTIONS)),
    "old articles": accuracy(old),
    "new articles": accuracy(new),
    "old and new articles": accuracy(old + new),
}
tell("Accuracy on other new articles", accuracies)
print("largest penalties:", *words[largest])

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
kinds = {"section": (SECTIONS, "tab:red"), "common word": (COMMON, "silver"), "topic": (TOPICS, "tab:blue")}
for label, (kind, colour) in kinds.items():
    at = np.flatnonzero(np.isin(words[largest], kind))
    left.barh(at, found[largest[at]], color=colour, label=label)
left.set_yticks(range(16), words[largest])
left.invert_yaxis()
left.set(title="The words with the largest penalties")
left.legend(frameon=False)
bars(right, "Accuracy on other new articles", accuracies)
figure.savefig(out / "text.png", dpi=90)
