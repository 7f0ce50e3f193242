"""Attention maps: how far apart the heads of two models look, layer by layer.

    python -m xformer.analysis attention CHECKPOINT CHECKPOINT data=STORE out=DIR
    python -m xformer.analysis attention ckpt/bert ckpt/plus data=stores/protein show=11 \\
      mapping=symbols:0 mapping_b=none examples=200 out=figures

For each example the heads of one layer of the first model are matched one to one with those of the
same layer of the second so that the mean L1 distance of their maps is least (Kao & Lee 2021,
section 4.4.1 and figure 5). The distance of two maps is the sum over keys of |a - b|, averaged over
queries: 0 for equal maps, 2 for maps that look at different tokens.

H heads, L length of an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xformer.analysis import drawing
from xformer.analysis.command import Command, progress, publish
from xformer.analysis.examples import (
    Examples,
    ExamplesConfig,
    look_inside,
    open_examples,
)
from xformer.data import style
from xformer.data.display import say
from xformer.data.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READABLE = 24  # tokens of an example whose maps are drawn, at most, if one is so short


class AttentionConfig(ExamplesConfig):
    """Which maps are compared and shown."""

    examples: int = Field(64, ge=1)
    """How many rows, drawn by `seed`; all of them if the split has no more."""
    show: str = "last"
    """The layer, from 1, whose matched heads are drawn for one example."""
    example: int | None = Field(None, ge=0)
    """Row of the split that is drawn; absent: the longest of the drawn rows that is readable."""


COMMAND = Command("attention", AttentionConfig, __doc__ or "", 2, 2)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Mean L1 distances of every map to every other: (H, L, L), (H', L, L) -> (H, H'), 0 to 2."""
    # head by head: torch.cdist is slower, all pairs at once take H times the memory
    return torch.stack([(b - one).abs_().sum((1, 2)) for one in a]) / a.size(1)


def match(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest one-to-one matching (Hungarian algorithm): heads of the first and of the second
    in pairs, min(H, H') of them."""
    from scipy.optimize import linear_sum_assignment

    ours, theirs = linear_sum_assignment(cost)
    return ours, theirs


def run(paths: list[str], config: AttentionConfig) -> None:
    """`python -m xformer.analysis attention A B key=value ...`"""
    examples = open_examples(config, paths)
    first, second = examples.readers
    layers = min(first.layers, second.layers)
    if config.show not in ("last", *map(str, range(1, layers + 1))):
        raise BadInput(f"show={config.show}: give last, or one layer from 1 to {layers}")
    show = layers if config.show == "last" else int(config.show)
    if config.example is not None and config.example >= first.assembler.split.rows:
        raise BadInput(
            f"example={config.example}: the split has {first.assembler.split.rows} rows, from 0"
        )
    if first.layers != second.layers:
        say(
            f"{first.layers} and {second.layers} layers: the first {layers} are compared",
            error=True,
        )
    found = compare(examples, layers)
    result = {
        "analysis": "attention",
        **examples.describe(),
        "layers": found,
        "picture": _picture(examples, found, show, config.example),
    }
    means = [layer["distance"]["mean"] for layer in found]
    line = (
        f"attention {first.name} - {second.name}: mean L1 distance of matched heads "
        f"{np.mean(means):.4f} (0 to 2; layers {', '.join(f'{m:.3f}' for m in means)}) on "
        f"{len(examples.rows)} examples"
    )
    metrics = {f"layer_{i + 1}": mean for i, mean in enumerate(means)}
    metrics["mean"] = float(np.mean(means))
    publish(config, result, draw, line, {"distance": metrics})


def compare(examples: Examples, layers: int) -> list[dict[str, Any]]:
    """For each layer: the distance after matching the heads of each example (its mean and deviation
    over examples), that of all pairs of heads, and the one matching of the mean distances."""
    costs: list[list[np.ndarray]] = [[] for _ in range(layers)]
    parts = list(examples.parts())
    for part in progress(parts, len(examples.rows), "examples", len):
        ours, theirs = (look_inside(r, part, maps=True)[1].maps for r in examples.readers)
        for layer in range(layers):
            costs[layer] += [
                distances(a, b).cpu().double().numpy()
                for a, b in zip(ours[layer], theirs[layer], strict=True)
            ]
    return [_of_layer(i + 1, np.stack(layer)) for i, layer in enumerate(costs)]


def _of_layer(number: int, costs: np.ndarray) -> dict[str, Any]:
    """What the costs (N, H, H') of one layer's examples say."""
    each = np.array([cost[match(cost)].mean() for cost in costs])
    mean = costs.mean(0)
    ours, theirs = match(mean)
    return {
        "layer": number,
        "distance": {
            "mean": float(each.mean()),
            "deviation": float(each.std(ddof=1)) if len(each) > 1 else 0.0,
        },
        "unmatched": float(mean.mean()),
        "matching": {
            "first": ours.tolist(),
            "second": theirs.tolist(),
            "distance": mean[ours, theirs].tolist(),
        },
        "distances": mean.tolist(),
    }


def _picture(
    examples: Examples, found: list[dict[str, Any]], layer: int, row: int | None
) -> dict[str, Any]:
    """The maps of one example and layer, the second model's heads in the order of the matching."""
    if row is None:
        readable = np.flatnonzero(examples.sizes <= READABLE)
        row = int(examples.rows[readable[-1] if len(readable) else 0])
    rows, matching = np.array([row]), found[layer - 1]["matching"]
    maps, pieces = [], []
    for reader, heads in zip(examples.readers, ("first", "second"), strict=True):
        batch, inside = look_inside(reader, rows, maps=True)
        maps.append(inside.maps[layer - 1][0].cpu()[matching[heads]].double())
        pieces.append([reader.checkpoint.tokenizer.pieces[i] for i in batch.tokens])
    apart = [float(distances(a[None], b[None])) for a, b in zip(*maps, strict=True)]
    return {
        "row": row,
        "layer": layer,
        "heads": [matching["first"], matching["second"]],
        "pieces": pieces,
        "distance": apart,
        "maps": [np.round(m.numpy(), 5).tolist() for m in maps],
    }


# ----------------------------------------------------------------------------------- drawing


def draw(result: dict[str, Any]) -> Figure:
    """The curve over layers, the matching of one layer, and the matched heads of one example."""
    names = [drawing.short(c["name"]) for c in result["checkpoints"]]
    heads = result["picture"]["heads"]
    count = len(heads[0])
    with_maps = max(6, min(count, 12))
    figure = style.new_figure(1.15 * with_maps, 7.2)
    rows: list[Any] = [
        ["curve"] * (with_maps // 2) + ["matching"] * (with_maps - with_maps // 2),
        *[[f"{side}{i}" if i < count else "." for i in range(with_maps)] for side in "ab"],
    ]
    axes: Any = figure.subplot_mosaic(rows, height_ratios=[2.6, 1, 1])
    _draw_curve(axes["curve"], result)
    _draw_matching(axes["matching"], result, names, figure)
    _draw_heads(axes, result, names, min(count, with_maps))
    store = drawing.of_stores(result["data"]["store"])
    figure.suptitle(
        f"{names[0]} and {names[1]}\n"
        f"attention on {drawing.many(result['data']['examples'], 'example')} of {store}",
        fontsize=10.5,
    )
    figure.supxlabel(
        "maps: queries down, keys across; colours from 0 to each map's own maximum",
        fontsize=8,
        color=style.FAINT,
    )
    return figure


def _draw_curve(axes: Any, result: dict[str, Any]) -> None:
    layers = result["layers"]
    numbers = [layer["layer"] for layer in layers]
    mean = np.array([layer["distance"]["mean"] for layer in layers])
    spread = np.array([layer["distance"]["deviation"] for layer in layers])
    colour = "C0"
    axes.fill_between(
        numbers,
        mean - spread,
        mean + spread,
        color=colour,
        alpha=0.22,
        lw=0,
        label="± sd over examples",
    )
    axes.plot(numbers, mean, "o-", color=colour, ms=4, lw=1.8, label="heads matched by example")
    fixed = [float(np.mean(layer["matching"]["distance"])) for layer in layers]
    axes.plot(numbers, fixed, "s--", color="C1", ms=3.5, lw=1.3, label="one matching for all")
    axes.plot(
        numbers,
        [layer["unmatched"] for layer in layers],
        ":",
        color=style.FAINT,
        lw=1.5,
        label="all pairs of heads",
    )
    axes.set(xlabel="layer", ylabel="mean L1 distance of maps (0 to 2)", title="Distance by layer")
    axes.set_xticks(numbers)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7.5)


def _draw_matching(axes: Any, result: dict[str, Any], names: list[str], figure: Any) -> None:
    layer = result["layers"][result["picture"]["layer"] - 1]
    values = np.array(layer["distances"])
    image = axes.imshow(values, origin="lower", aspect="auto")
    axes.plot(
        layer["matching"]["second"],
        layer["matching"]["first"],
        "o",
        mfc="none",
        ms=9,
        mew=1.6,
        color="C1",
    )
    axes.grid(False)
    axes.set_xticks(range(values.shape[1]), range(1, values.shape[1] + 1), fontsize=8)
    axes.set_yticks(range(values.shape[0]), range(1, values.shape[0] + 1), fontsize=8)
    axes.set(
        xlabel=f"head of {names[1]}",
        ylabel=f"head of {names[0]}",
        title=f"Matching of layer {layer['layer']} (circles)",
    )
    figure.colorbar(image, ax=axes, label="mean L1 distance", fraction=0.05, pad=0.02)


def _draw_heads(axes: Any, result: dict[str, Any], names: list[str], count: int) -> None:
    picture = result["picture"]
    for i in range(count):
        for side, maps, heads in zip("ab", picture["maps"], picture["heads"], strict=True):
            panel = axes[f"{side}{i}"]
            panel.imshow(maps[i], vmin=0, vmax=max(map(max, maps[i])))
            panel.grid(False)
            panel.set_xticks([])
            panel.set_yticks([])
            panel.set_title(f"head {heads[i] + 1}", fontsize=8, pad=2)
        axes[f"b{i}"].set_xlabel(f"L1 {picture['distance'][i]:.2f}", fontsize=8)
    size = len(picture["maps"][0][0])
    axes["a0"].set_ylabel(names[0], fontsize=8)
    axes["b0"].set_ylabel(f"{names[1]}\n(row {picture['row']}, {size} tokens)", fontsize=8)
