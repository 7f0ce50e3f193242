"""Turn texts that are not in a store into packed batches for training, or into vectors.

N texts, T tokens of a batch, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from xformer.data.batch import CHUNK, Assembler, Batch, Masks, chunks
from xformer.data.display import Progress, say
from xformer.data.errors import BadInput
from xformer.data.memory import split_of
from xformer.data.tokenizers import Tokenizer, unknown_note
from xformer.tasks.task import Model, check_finite, evaluating, row_states, to_device

Pooling = Literal["mean", "first"]
# the names that other programs have for a pooling
POOLING_NAMES = {
    "mean": "average avg mean_pooling mean_tokens pooling_mode_mean_tokens",
    "first": "bos cls cls_token first_token pooler pooler_output pooling_mode_cls_token",
}
CPU = torch.device("cpu")


def pack(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    labels: Any = None,
    *,
    texts_b: Sequence[str] | None = None,
    max_tokens: int = 128,
    masking: float = 0.0,
    source: Tokenizer | None = None,
    mapping: np.ndarray | None = None,
) -> Batch[Tensor]:
    """Pack `texts` in their order into a batch on the CPU, for `model(batch)`. A `collate_fn` can
    call this.

    `labels` are N class numbers or N scores. With `texts_b` the rows are pairs, and labels may also
    be (N, 2), the first and the last token of an answer in each second text. A text is truncated
    so that its row has at most `max_tokens` tokens, special tokens included, whatever the model
    accepts. `masking` is the probability that a token is chosen for masked language modelling.
    torch's random generator chooses, so `torch.manual_seed` makes the choice reproducible. A
    checkpoint that reads mapped ids has a `source` and a `mapping`: give both.

    Raises BadInput if a text is not a string, or if `masking`, `max_tokens` or a label is not
    allowed, and ValueError if the numbers of texts and labels differ.
    """
    if not 0 <= masking <= 1:
        raise BadInput(f"masking={masking} is not a probability; give a number from 0 to 1")
    split = split_of(source or tokenizer, texts, texts_b, labels)
    rows, masks = np.arange(split.rows), None
    if masking:
        masks = Masks(int(torch.randint(2**62, ())), masking, np.zeros_like(rows))
    assembler = Assembler(split, tokenizer, max_tokens, mapping)
    return to_device(assembler.in_order(rows, masks), CPU)


@torch.no_grad()
def vectors_of(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
    max_tokens: int | None = None,
    batch_tokens: int = CHUNK,
    source: Tokenizer | None = None,
    mapping: np.ndarray | None = None,
) -> np.ndarray:
    """The vectors of `texts`, (N, C) float32, in their order.

    A vector is the mean of the last hidden states of a text, special tokens included ("mean"), or
    the hidden state of its first token ("first"). With `normalize` its Euclidean length is 1.
    Texts are cut to `max_tokens` tokens, special tokens included (default: as many as the model
    accepts). A line on standard error says how many were cut. Texts of similar length share packed
    batches of about `batch_tokens` tokens. If the model reads mapped ids, give the tokenizer of the
    texts as `source`, and the `mapping` of its ids to the model's.

    Raises BadInput if an argument is not allowed or the model has no hidden states, and Failure if
    a vector is not finite.
    """
    longest = check_arguments(model, pooling, max_tokens, batch_tokens)
    split = split_of(source or tokenizer, texts)
    assembler = Assembler(split, tokenizer, longest, mapping)
    if note := unknown_note(split.columns["tokens"].values, source or tokenizer):
        say(note, error=True)
    vectors = np.zeros((len(texts), model.config.hidden), np.float32)
    if not len(texts):
        return vectors
    if note := assembler.truncation(f"{longest} tokens", model.config.max_positions):
        say(note.replace("rows", "texts"), error=True)
    device = next(model.parameters()).device
    with evaluating(model), Progress("encoding", len(texts), "texts") as progress:
        for rows in chunks(assembler, len(texts), batch_tokens):
            host = assembler.batch(rows)
            x = row_states(model, to_device(host, device), pooling).float()
            x = torch.nn.functional.normalize(x) if normalize else x
            vectors[host.rows] = x.cpu().numpy()
            progress.advance(len(rows))
    check_finite(vectors, "the vectors")
    return vectors


def check_arguments(model: Model, pooling: str, max_tokens: int | None, batch_tokens: int) -> int:
    """The number of tokens to which texts are cut. Raises BadInput if an argument of `vectors_of`
    is not allowed, or if the model has no hidden states."""
    most = model.config.max_positions
    if model.cnn is not None:
        raise BadInput("a hilbert_cnn has no hidden states; give a transformer")
    check_pooling(pooling)
    if max_tokens is not None and not 2 <= max_tokens <= most:
        raise BadInput(f"max_tokens={max_tokens} must be from 2 to {most}, the model's limit")
    if batch_tokens < 1:
        raise BadInput(f"batch_tokens={batch_tokens} must be at least 1")
    return max_tokens or most


def check_pooling(pooling: object) -> None:
    """Raise BadInput unless this is a pooling. If other programs give a pooling this name, the
    message says ours."""
    if pooling not in list(POOLING_NAMES):
        own = str(pooling).lower().replace("-", "_")
        near = [name for name, others in POOLING_NAMES.items() if own in others.split()]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadInput(f"pooling={pooling!r} must be 'mean' or 'first'{hint}")
