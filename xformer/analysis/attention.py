"""Attention maps: how far apart the heads of two models are, layer by layer.

    python -m xformer.analysis attention CHECKPOINT CHECKPOINT data=STORE out=DIR
    python -m xformer.analysis attention ckpt/bert ckpt/plus data=stores/protein show=11 \\
      mapping=symbols:0 mapping_b=none examples=200 out=figures

In each layer and for each example, the heads of the first model are matched one to one with those
of the second, so that the mean L1 distance of matched maps is minimal (Kao & Lee 2021, section
4.4.1 and figure 5). The distance between two maps is the sum over keys of |a - b|, averaged over
queries. It is 0 for equal maps, and 2 for maps that attend to disjoint sets of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xformer.analysis import drawing
from xformer.analysis.examples import Examples, ExamplesConfig, look_inside, open_examples
from xformer.analysis.subcommand import Subcommand, publish, with_progress
from xformer.data import style
from xformer.data.display import many, say
from xformer.data.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Shapes: H heads, H' heads of the second model, L tokens of an example, N examples.

READABLE = 24  # tokens; maps of longer examples are illegible in a figure


class AttentionConfig(ExamplesConfig):
    """Which maps are compared, and which are drawn."""

    examples: int = Field(64, ge=1)
    """Number of rows, drawn at random with `seed`, or all rows if the split has fewer."""
    show: str = "last"
    """The layer whose matched heads are drawn for one example: last, or a number from 1."""
    example: int | None = Field(None, ge=0)
    """The row of the split whose maps are drawn, counted from 0. Default: the longest of the
    compared rows with at most 24 tokens, or the shortest if all are longer."""


SUBCOMMAND = Subcommand("attention", AttentionConfig, __doc__ or "", 2, 2)


def map_distances(a: Tensor, b: Tensor) -> Tensor:
    """L1 distances of all pairs of maps, averaged over queries: (H, L, L), (H', L, L) -> (H, H').

    A distance is between 0 and 2.
    """
    # One head at a time: torch.cdist is slower, and all pairs at once need H times the memory.
    return torch.stack([(b - head).abs_().sum((1, 2)) for head in a]) / a.size(1)


def match(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The one-to-one matching with the lowest total cost (H, H'), by the Hungarian algorithm.

    Returns the heads of the first model and their partners, min(H, H') of each.
    """
    from scipy.optimize import linear_sum_assignment

    ours, theirs = linear_sum_assignment(cost)
    return ours, theirs


def run(paths: list[str], config: AttentionConfig) -> None:
    """`python -m xformer.analysis attention A B key=value ...`"""
    examples = open_examples(config, paths)
    first, second = examples.models
    layers = min(first.layers, second.layers)
    if config.show not in ("last", *map(str, range(1, layers + 1))):
        raise BadInput(f"show={config.show}: give last, or one layer from 1 to {layers}")
    show = layers if config.show == "last" else int(config.show)
    if config.example is not None and config.example >= first.assembler.split.rows:
        raise BadInput(
            f"example={config.example}: the split has {first.assembler.split.rows} rows; give a "
            f"number from 0 to {first.assembler.split.rows - 1}"
        )
    if first.layers != second.layers:
        say(
            f"the models have {first.layers} and {second.layers} layers: the first {layers} of "
            "each are compared",
            error=True,
        )
    distances = layer_distances(examples, layers)
    result = {
        "analysis": "attention",
        **examples.describe(),
        "layers": distances,
        "picture": _matched_maps(examples, distances[show - 1], config.example),
    }
    means = [layer["distance"]["mean"] for layer in distances]
    line = (
        f"attention {first.name} - {second.name}: mean L1 distance of matched heads "
        f"{np.mean(means):.4f} (0 to 2; layers {', '.join(f'{m:.3f}' for m in means)}) on "
        f"{many(len(examples.rows), 'example')}"
    )
    metrics = {f"layer_{i + 1}": mean for i, mean in enumerate(means)}
    metrics["mean"] = float(np.mean(means))
    publish(config, result, draw, line, {"distance": metrics})


def layer_distances(examples: Examples, layers: int) -> list[dict[str, Any]]:
    """The distances of the two models' maps, for each of the first `layers` layers."""
    costs: list[list[np.ndarray]] = [[] for _ in range(layers)]
    parts = list(examples.parts())
    for part in with_progress(parts, len(examples.rows), "examples", len):
        ours, theirs = (look_inside(loaded, part, maps=True)[1].maps for loaded in examples.models)
        for layer in range(layers):
            costs[layer] += [
                map_distances(a, b).cpu().double().numpy()
                for a, b in zip(ours[layer], theirs[layer], strict=True)
            ]
    return [_of_layer(i + 1, np.stack(layer)) for i, layer in enumerate(costs)]


def _of_layer(number: int, costs: np.ndarray) -> dict[str, Any]:
    """The entry of one layer in the result, from the distances (N, H, H') of all pairs of heads in
    each example.

    `distance` is the mean over heads that are matched in each example separately, with its standard
    deviation over examples. `unmatched` is the mean over all pairs of heads. `matching` is a single
    matching for all examples, by the mean distances.
    """
    each = np.array([cost[match(cost)].mean() for cost in costs])
    mean = costs.mean(0)
    ours, theirs = match(mean)
    return {
        "layer": number,
        "distance": drawing.spread(each),
        "unmatched": float(mean.mean()),
        "matching": {
            "first": ours.tolist(),
            "second": theirs.tolist(),
            "distance": mean[ours, theirs].tolist(),
        },
        "distances": mean.tolist(),
    }


def _matched_maps(examples: Examples, layer: dict[str, Any], row: int | None) -> dict[str, Any]:
    """The maps of one layer for one row, with the heads of both models in matched order."""
    if row is None:  # rows are sorted by length
        readable = np.flatnonzero(examples.sizes <= READABLE)
        row = int(examples.rows[readable[-1] if len(readable) else 0])
    rows, number, matching = np.array([row]), layer["layer"], layer["matching"]
    maps, pieces = [], []
    for loaded, heads in zip(examples.models, ("first", "second"), strict=True):
        batch, inside = look_inside(loaded, rows, maps=True)
        maps.append(inside.maps[number - 1][0].cpu()[matching[heads]].double())
        pieces.append([loaded.checkpoint.tokenizer.pieces[i] for i in batch.tokens])
    apart = [float(map_distances(a[None], b[None])) for a, b in zip(*maps, strict=True)]
    return {
        "row": row,
        "layer": number,
        "heads": [matching["first"], matching["second"]],
        "pieces": pieces,
        "distance": apart,
        "maps": [np.round(m.numpy(), 5).tolist() for m in maps],
    }


# ----------------------------------------------------------------------------------- drawing


def draw(result: dict[str, Any]) -> Figure:
    """Distances by layer, the matching of one layer, and up to 12 of its matched heads for one
    example."""
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
        f"attention on {many(result['data']['examples'], 'example')} of {store}",
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
    if result["data"]["examples"] > 1:
        deviation = np.array([layer["distance"]["deviation"] for layer in layers])
        look: Any = {"color": "C0", "alpha": 0.22, "label": "± sd over examples"}
        if len(layers) > 1:
            axes.fill_between(numbers, mean - deviation, mean + deviation, lw=0, **look)
        else:
            axes.errorbar(numbers, mean, deviation, fmt="none", elinewidth=8, **look)
    axes.plot(numbers, mean, "o-", color="C0", ms=4, lw=1.8, label="heads matched by example")
    fixed = [float(np.mean(layer["matching"]["distance"])) for layer in layers]
    axes.plot(numbers, fixed, "s--", color="C1", ms=3.5, lw=1.3, label="one matching for all")
    axes.plot(
        numbers,
        [layer["unmatched"] for layer in layers],
        ":" if len(layers) > 1 else "_",
        ms=18,
        color=style.FAINT,
        lw=1.5,
        label="all pairs of heads",
    )
    axes.set(xlabel="layer", ylabel="mean L1 distance of maps (0 to 2)", title="Distance by layer")
    axes.set_xticks(numbers)
    axes.set_ylim(0, None if len(layers) > 1 else 1.2 * axes.get_ylim()[1])
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
