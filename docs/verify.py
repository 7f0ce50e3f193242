"""Recompute every score in a directory of kept results, and every effect in its *.claims.json, from
the predictions. Only numpy, scipy and scikit-learn are needed. docs/formats.md describes the files.

    python docs/verify.py                     # results/
    python docs/verify.py runs/kept

A line says for each number whether it agrees, also for the words that a page prints of a claim. The
scores in a *.results.csv share a line. A verdict differs if the numbers of its claim rule it out.
"undecided" is never ruled out, because a run at chance or a planned extension leads to it too. What
needs weights is not repeated: claims about analyses and training losses are computed again from the
numbers that were kept, and are called "measured". A number also differs if one of its runs is not
kept. The exit status is 1 if something differs, and 2 if the directory has no kept results.
"""

import csv
import json
import re
import string
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special, stats
from sklearn import metrics

# what reading a damaged file raises
DAMAGES = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
)
AGREES, DIFFERS, UNKNOWN = "agrees", "DIFFERS", "not checked"
MEASURED = "measured"  # agrees with numbers that no predictions give
Known = dict[tuple[str, ...], tuple[float, str]]  # (key, split, name) -> score, AGREES or MEASURED
UNLABELLED, UNSEEN = -1, -2  # rows without a label; with a class that does not occur in training


def scores(arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """The scores of the predictions of one split, by name."""
    about = json.loads(arrays["about"].item())
    head = about["head"]
    if head == "mlm":
        return masked(arrays)
    if head == "tag":
        return tags(arrays, about["classes"])
    if head == "span":
        return spans(arrays, about["questions"], about["threshold"])
    if head not in ("classify", "regress", "choice"):
        return {}
    label, outputs = arrays["label"], arrays["outputs"].astype(float)
    known = ~np.isnan(label) if head == "regress" else label != UNLABELLED
    outputs, label = outputs[known], label[known]
    group = arrays["group"][known] if "group" in arrays else np.arange(len(label))
    _, first, group = np.unique(group, return_index=True, return_inverse=True)
    if head == "choice":
        outputs, label = outputs.reshape(len(first), -1), label[first]
        accuracy = float((outputs.argmax(1) == label).mean())
        return {"loss": cross_entropy(outputs, label), "accuracy": accuracy}
    if head == "regress":
        x, y = of_groups(outputs, group)[:, 0], label[first]
        unit = about.get("scale", (0, 1))[1]  # of standardized scores, a deviation
        loss = float((((outputs[:, 0] - label) / unit) ** 2).mean())
        again = {"loss": loss, "pearson": 0, "spearman": 0}
        if np.ptp(x) and np.ptp(y):  # a constant has no correlation, and GLUE counts it as 0
            again |= {"pearson": stats.pearsonr(x, y)[0], "spearman": stats.spearmanr(x, y)[0]}
        return again
    loss = cross_entropy(outputs, label)
    if len(first) < len(label):  # rows vote for a class; the mean probability breaks ties
        votes = np.eye(outputs.shape[1])[outputs.argmax(1)]
        counted = of_groups(votes, group) * np.bincount(group)[:, None]
        outputs = counted + of_groups(special.softmax(outputs, 1), group) / 2
    predicted, label = outputs.argmax(1), label[first]
    again = {"loss": loss, "mcc": metrics.matthews_corrcoef(label, predicted)}
    return again | classes(predicted, label, outputs.shape[1])


def classes(
    predicted: np.ndarray, label: np.ndarray, count: int, binary: bool = True
) -> dict[str, float]:
    """Accuracy, and F1: that of class 1 if there are two classes, else the mean over classes."""
    names = [1] if count == 2 and binary else range(count)
    f1 = metrics.f1_score(label, predicted, labels=names, average="macro", zero_division=0)
    return {"accuracy": (predicted == label).mean(), "f1": f1}


def cross_entropy(outputs: np.ndarray, label: np.ndarray) -> float:
    """The mean over the rows whose class occurs in training."""
    seen = np.flatnonzero(label != UNSEEN)
    return float(-special.log_softmax(outputs, 1)[seen, label[seen]].mean())


def of_groups(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The mean of each group's rows."""
    return np.array([values[group == i].mean(0) for i in range(group.max() + 1)])


# ------------------------------------------------------------------------- labels of words


def tags(arrays: dict[str, np.ndarray], names: list[str]) -> dict[str, float]:
    """Scores of labelled words; truncated words are left out."""
    known = (arrays["label"] != UNLABELLED) & (arrays["predicted"] >= 0)
    row, label, predicted, loss = (arrays[n][known] for n in ("row", "label", "predicted", "loss"))
    again = classes(predicted, label, len(names), binary=False)
    if (label >= 0).any():
        again["loss"] = loss[label >= 0].astype(float).mean()
    if {*names} - {"O"} and all(re.fullmatch("O|[BIMELSU]-.+", name) for name in names):
        named = [*names, "I-(unseen)", "I-(unseen)"]  # for the numbers -2 (UNSEEN) and -1
        ours, gold = (entities([named[i] for i in side], row) for side in (predicted, label))
        both = len(ours) + len(gold)
        again["entity_f1"] = 2 * len(ours & gold) / both if both else 1.0
    return again


def entities(labels: list[str], row: np.ndarray) -> set[tuple[int, int, str]]:
    """First word, end and type of each entity. One begins at B-X, S-X and U-X, and at any other
    label of X that does not continue an entity of X in the same row (Tjong Kim Sang & De Meulder
    2003). E-X, L-X, S-X and U-X are the last word of an entity."""
    every, start = set(), 0
    for i in range(1, len(labels) + 1):
        kind = labels[i - 1][2:]
        going_on = labels[i - 1][0] not in "ELSU" and i < len(labels) and row[i] == row[i - 1]
        if not going_on or labels[i] not in {f"{mark}-{kind}" for mark in "IMEL"}:
            every.add((start, i, kind))
            start = i
    return {entity for entity in every if entity[2]}


# ------------------------------------------------------------------------- answers to questions


def spans(arrays: dict[str, np.ndarray], questions: dict, threshold: float | None) -> dict:
    """Scores of questions. A question has one window or more. It stays unanswered if the score of
    "no answer" is above that of the best span by more than the threshold."""
    group, right = arrays["group"], questions["right"]
    null, best = (arrays[name].astype(float) for name in ("no_answer", "best"))
    margin = np.full(len(right), np.inf)  # of the lowest "no answer" over the highest span
    highest = np.full(len(right), -np.inf)
    np.minimum.at(margin, group, null)
    np.maximum.at(highest, group, best)
    margin -= highest
    known = [i for i, answers in enumerate(right) if answers is not None]
    answers, right = ([texts[i] for i in known] for texts in (questions["answer"], right))
    margin = margin[known]
    if threshold is None:
        threshold = np.inf if all(right) else 0.0
    chosen = [text if m <= threshold else "" for text, m in zip(answers, margin, strict=True)]
    loss = arrays["loss"][np.isin(group, known)].astype(float).mean()
    again = {"loss": loss, **squad(chosen, right)}
    return again if all(right) else again | best_threshold(answers, right, margin)


def squad(answers: list[str], right: list[list[str]]) -> dict[str, float]:
    """Exact match and F1 over words (Rajpurkar et al. 2016, 2018): means over all questions, and
    over those with and without an answer if there are both."""
    each = np.array([of_answer(*pair) for pair in zip(answers, right, strict=True)])
    has = np.array([bool(golds) for golds in right])
    parts = {"": has | True}
    if 0 < has.sum() < len(has):
        parts |= {"answerable_": has, "unanswerable_": ~has}
    means = {part: each[rows].mean(0) for part, rows in parts.items()}
    return {f"{p}{n}": m[i] for p, m in means.items() for i, n in enumerate(("exact_match", "f1"))}


def of_answer(answer: str, right: list[str]) -> tuple[float, float]:
    """Exact match and F1 of an answer with the most similar right one; "" is right if there is
    none."""
    ours = words(answer)
    golds = [gold for gold in map(words, right) if gold] or [[]]
    return float(ours in golds), max(overlap(ours, gold) for gold in golds)


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def overlap(ours: list[str], gold: list[str]) -> float:
    """F1 over words. It is 1 if neither side has words, and 0 if only one has."""
    if not ours or not gold:
        return float(ours == gold)
    return 2 * (Counter(ours) & Counter(gold)).total() / (len(ours) + len(gold))


def best_threshold(
    answers: list[str], right: list[list[str]], margin: np.ndarray
) -> dict[str, float]:
    """The highest scores of any threshold, and the threshold of the highest F1: the questions whose
    margin is not above it are answered."""
    order = np.argsort(margin, kind="stable")
    empty = np.array([of_answer("", golds) for golds in right])
    gain = np.array([of_answer(*pair) for pair in zip(answers, right, strict=True)]) - empty
    # row k: the sums if the first k questions are answered
    totals = empty.sum(0) + np.vstack([[0, 0], gain[order].cumsum(0)])
    margin = margin[order]
    ends = np.r_[0, 1 + np.flatnonzero(margin[1:] > margin[:-1]), len(margin)]  # not within ties
    exact, f1 = (totals[ends, i] / len(right) for i in (0, 1))
    k = ends[f1.argmax()]
    threshold = margin[k - 1] if k else margin[0] - 1
    return {"best_exact_match": exact.max(), "best_f1": f1.max(), "best_threshold": threshold}


# --------------------------------------------------------------------------------- masked tokens


def masked(arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """Scores of masked language modelling; with a pair head those of the pairs too."""
    count = arrays["masked"].sum()
    loss = arrays["loss"].astype(float).sum() / count
    again = {"loss": loss, "accuracy": arrays["correct"].sum() / count, "perplexity": np.exp(loss)}
    if "label" in arrays and (known := arrays["label"] != UNLABELLED).any():
        outputs, label = arrays["outputs"][known].astype(float), arrays["label"][known]
        again["pair_loss"] = cross_entropy(outputs, label)
        again["pair_accuracy"] = (outputs.argmax(1) == label).mean()
    return again


def pairs_of(claim: dict, known: Known) -> list[float]:
    """The difference of each seed of a claim, from recomputed scores."""
    return [sum(weight * known[tuple(of)][0] for weight, *of in terms) for terms in claim["pairs"]]


def effect(claim: dict, pairs: list[float]) -> dict[str, Any]:
    """Mean, half width of the 95 % t interval, and p of a claim. Without spread there is neither a
    p nor an interval, and of two pairs no interval."""
    mean, margin = np.mean(pairs), claim["margin"]
    if len(pairs) < 2 or np.std(pairs) < 1e-9 * max(1.0, *np.abs(pairs)):
        return {"effect": mean, "half": None, "p": None}
    p = stats.ttest_1samp(pairs, -margin if claim["tie"] and mean < 0 else margin).pvalue
    if claim["tie"] and abs(mean) < margin:  # two one-sided tests
        one = stats.ttest_1samp(pairs, -margin, alternative="greater").pvalue
        p = max(one, stats.ttest_1samp(pairs, margin, alternative="less").pvalue)
    half = stats.t.ppf(0.975, len(pairs) - 1) * stats.sem(pairs)
    return {"effect": mean, "half": half if len(pairs) > 2 else None, "p": p}


def is_shown(claim: dict, again: dict[str, Any], pairs: list[float]) -> bool:
    """Whether the words of a claim, such as "+4.2 ± 8.1", have its numbers; "+4.2 (seeds: +3.1,
    +5.3)" of two pairs."""
    words = [float(word) for word in re.findall(r"[+-]?\d+(?:\.\d+)?", claim["shown"])]
    numbers = [again["effect"], *(pairs if len(pairs) == 2 else [again["half"]])]
    numbers = [number for number in numbers if number is not None]
    return len(words) == len(numbers) and np.allclose(
        words, numbers, rtol=0, atol=0.5 * 10 ** -claim["digits"] + 1e-6
    )


def is_possible(parts: list[tuple[dict, dict[str, Any]]]) -> bool:
    """Whether the numbers of all parts of a claim allow its verdict."""
    left = sum(again["p"] is not None for _, again in parts)
    states, highest = [], 0.0
    for claim, again in sorted(parts, key=lambda part: (part[1]["p"] is None, part[1]["p"])):
        decided = False
        if again["p"] is not None:  # Holm's correction (1979)
            highest, left = max(highest, min(1.0, left * again["p"])), left - 1
            decided = highest <= 0.05
        mean, margin = again["effect"], claim["margin"]
        ahead = abs(mean) < margin if claim["tie"] else mean > margin
        states.append(("holds" if ahead else "fails") if decided else "undecided")
    verdict = parts[0][0]["verdict"]
    if any(claim["verdict"] != verdict for claim, _ in parts):
        return False
    if verdict == "holds":
        return set(states) == {"holds"}
    return verdict == "undecided" or (verdict == "fails" and "fails" in states)


def say(word: str, text: str) -> str:
    """Print a line, and return its word: AGREES, DIFFERS or UNKNOWN."""
    print(f"{word:<12} {text}")
    return word


def compare(name: str, published: float | None, again: float | None, right: str = AGREES) -> str:
    """Say whether a number agrees; `right` is the word if it does. Both may lack."""
    if published is None or again is None:
        here = "none" if again is None else f"{again:.6g}"
        return say(DIFFERS, f"{name}: {'none' if published is None else published}, here {here}")
    word = right if np.isclose(published, again, rtol=1e-6, atol=1e-9) else DIFFERS
    return say(word, f"{name}: {published:.6g}, here {again:.6g}")


def say_open(title: str, directory: Path, keys: set[str]) -> str:
    """Say that a number cannot be computed again; it differs if one of its runs is not kept."""
    lost = sorted(key for key in keys if not (directory / f"{key}.zip").exists())
    return say(DIFFERS, f"{title}: {', '.join(lost)} not kept") if lost else say(UNKNOWN, title)


def of_claims(path: Path, known: Known) -> list[str]:
    """The words of all lines about a file of claims."""
    words = []
    claims = json.loads(path.read_text(encoding="utf-8"))["claims"]
    for text, parts in groupby(claims, key=lambda claim: claim["text"]):
        every, recomputed = list(parts), []
        terms = [tuple(of) for claim in every for pair in claim["pairs"] for _, *of in pair]
        right = MEASURED if MEASURED in [known[of][1] for of in terms if of in known] else AGREES
        for claim in every:
            part = f": {claim['part']}" if claim["part"] else ""
            title = f"{path.stem}: {text}{part}"
            needed = {tuple(of) for pair in claim["pairs"] for _, *of in pair}
            if not needed <= set(known):
                words.append(say_open(title, path.parent, {key for key, *_ in needed}))
                continue
            pairs = pairs_of(claim, known)
            again = effect(claim, pairs)
            recomputed.append((claim, again))
            for name, number in again.items():
                if number is not None or claim[name] is not None:
                    words.append(compare(f"{title}: {name}", claim[name], number, right))
            if "shown" not in claim:  # a file of an earlier version
                continue
            word = right if is_shown(claim, again, pairs) else DIFFERS
            words.append(say(word, f"{title}: {claim['shown']}"))
        word = UNKNOWN  # the verdict may come from a part that cannot be recomputed
        if len(recomputed) == len(every):
            word = right if is_possible(recomputed) else DIFFERS
        words.append(say(word, f"{path.stem}: {text}: {every[0]['verdict']}"))
    return words


def of_table(path: Path, known: Known) -> list[str]:
    """The words of all lines about a results.csv: each score that differs, or how many agree."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["value"]]
    pairs = [((row["key"], row["split"], row["metric"]), float(row["value"])) for row in rows]
    wrong = [
        compare(f"{path.name} {' '.join(of)}", value, known[of][0])
        for of, value in pairs
        if of in known and not np.isclose(value, known[of][0], rtol=1e-6, atol=1e-9)
    ]
    if wrong:
        return wrong
    words = [known[of][1] for of, _ in pairs if of in known]
    counts = [(word, words.count(word)) for word in (AGREES, MEASURED)]
    again = [say(word, f"{path.name}: {n} scores") for word, n in counts if n]
    if lost := [of for of, _ in pairs if of not in known]:
        again.append(
            say_open(f"{path.name}: {len(lost)} scores", path.parent, {o[0] for o in lost})
        )
    return again


def of_zip(path: Path, known: Known) -> list[str]:
    """The words of all lines about a kept run. Its scores, computed again, are added to `known`."""
    words = []
    with zipfile.ZipFile(path) as file:
        if (key := file.read("key").decode().strip()) != path.stem:
            words.append(say(DIFFERS, f"{path.name} holds the results of {key}"))
        known |= {(path.stem, *of): (value, MEASURED) for of, value in measured(file).items()}
        is_run = "result.json" in file.namelist()  # else the result of a command
        published = json.loads(file.read("result.json"))["metrics"] if is_run else {}
        for split in published:
            kept = f"predictions/{split}.npz" in file.namelist()
            content = file.read(f"predictions/{split}.npz") if kept else b""
            again = scores(dict(np.load(BytesIO(content)))) if kept else {}
            known |= {(path.stem, split, name): (v, AGREES) for name, v in again.items()}
            for name, value in published[split].items():
                title = f"{path.stem} {split} {name}"
                if name in again:
                    words.append(compare(title, value, again[name]))
                else:
                    words.append(say(UNKNOWN, f"{title}: {value:.6g}"))
    return words


def measured(file: zipfile.ZipFile) -> dict[tuple[str, str], float]:
    """The numbers of a kept job that no predictions give, by group and name: all of an analysis,
    and of a run the last line of its training."""
    names = file.namelist()
    groups = {}
    if "log.jsonl" in names:
        lines = [json.loads(line) for line in file.read("log.jsonl").splitlines()]
        trained = [line for line in lines if line["event"] == "train"]
        groups = {"train": trained[-1]} if trained else {}
    elif "result.json" not in names:
        result = [name for name in names if name.endswith(".json")]
        groups = json.loads(file.read(result[0])).get("metrics", {}) if result else {}
    return {(group, name): value for group in groups for name, value in groups[group].items()}


def read(of: Callable[..., list[str]], path: Path, known: Known) -> list[str]:
    """What `of` says of a file, or a line that the file is damaged."""
    try:
        return of(path, known)
    except DAMAGES as error:
        return [say(DIFFERS, f"{path.name} is damaged: {error}")]


def main(directory: Path) -> int:
    """The exit status."""
    known: Known = {}
    words = []
    if not any(directory.glob("*.zip")):
        print(f"error: {directory} has no kept results (*.zip); give a study's kept=DIRECTORY")
        return 2
    for path in sorted(directory.glob("*.zip")):
        words += read(of_zip, path, known)
    for path in sorted(directory.glob("*.claims.json")):
        words += read(of_claims, path, known)
    for path in sorted(directory.glob("*.results.csv")):
        words += read(of_table, path, known)
    print(", ".join(f"{words.count(word)} {word}" for word in (AGREES, MEASURED, DIFFERS, UNKNOWN)))
    return 1 if DIFFERS in words else 0


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__, end="")
    else:
        kept = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1] / "results"
        sys.exit(main(kept))
