"""Turn padded tensors, which other libraries use, into a packed batch.

N sequences, L their padded length, T real tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.data.batch import Batch


def packed(
    ids: Tensor, mask: Tensor | None, segments: Tensor | None, longest: int
) -> tuple[Batch[Tensor], Tensor]:
    """Padded ids (N, L) -> the packed batch, and the places (T,) of its tokens in ids.flatten().

    `mask` (N, L) is 0 or false at padding, and `segments` (N, L) is 1 for the second text of a
    pair. Without `mask` no token is padding, and without `segments` every segment is 0. `longest`
    is the length of the longest sequence that the model accepts. Raises ValueError if the tensors
    differ in shape, or if a sequence is longer than `longest`.
    """
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    segments = torch.zeros_like(ids) if segments is None else segments
    if ids.dim() != 2 or not ids.shape == real.shape == segments.shape:
        raise ValueError(
            f"ids, mask and segments must all be (sequences, length), not {tuple(ids.shape)}, "
            f"{tuple(real.shape)} and {tuple(segments.shape)}"
        )
    sizes = real.sum(1)  # (N,)
    if ids.size(1) > longest and len(ids) and (most := int(sizes.amax())) > longest:
        raise ValueError(f"a sequence has {most} tokens, but the model takes {longest} at most")
    places = real.flatten().nonzero().squeeze(1)  # (T,)
    batch = Batch(
        tokens=ids.flatten()[places],
        positions=(real.cumsum(1) - 1).flatten()[places],
        segments=segments.flatten()[places],
        cu_seqlens=F.pad(sizes.cumsum(0), (1, 0)).int(),
        longest=min(ids.size(1), longest),
    )
    return batch, places
