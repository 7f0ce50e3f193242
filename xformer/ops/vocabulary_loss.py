"""The loss of masked language modelling: the projection to the vocabulary, and its cross-entropy.

M masked tokens, E width of the embeddings, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.ops import native
from xformer.ops.cast_weights import autocast_type
from xformer.ops.library import define, differentiate, named

ALIGNED = 16  # logits: a product is faster if the rows it writes begin at multiples of 32 bytes


@named
def vocabulary_loss(
    h: Tensor, word: Tensor, bias: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the logits h W^T + b, summed over M, and the number of correct predictions.

    h: (at least M, E); rows beyond M do not count, but must be finite. word: (V, E). bias: (V,).
    targets: (M,), each in [0, V), or -100, which does not count. M may be 0. Returns two scalars:
    the sum in fp32 (in fp64 if h is fp64), and how often the target has the largest logit, which is
    not differentiable. If several logits are the largest, the first one is the prediction. The sum
    can be differentiated once; `plain` can be differentiated twice. Raises ValueError for other
    shapes, and on the CPU IndexError for other targets. On CUDA targets are not checked.
    """
    shapes = [tuple(tensor.shape) for tensor in (h, word, bias, targets)]
    if [len(shape) for shape in shapes] != [2, 2, 1, 1] or (
        h.size(1) != word.size(1) or len(word) != len(bias) or len(targets) > len(h)
    ):
        raise ValueError(f"vocabulary_loss takes (M, E), (V, E), (V,) and (M,), not {shapes}")
    dtype = autocast_type(h.device)
    if dtype is not None and h.dtype != torch.float64:
        h, word = h.to(dtype), word.to(dtype)
    if native.serves(h, word, bias) and h.dtype == word.dtype and bias.dtype == torch.float32:
        total, correct, _, _ = _in_cpp(h, word, bias, targets)
        return total, correct
    if h.is_cuda and not native.plain_is_asked():
        return one_pass(h, word, bias, targets)
    return plain(h, word, bias, targets)


def plain(h: Tensor, word: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same with PyTorch's operations, which keep all logits in memory."""
    logits = F.linear(h.narrow(0, 0, len(targets)), word, bias.to(word.dtype))  # (M, V)
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    correct = (logits.detach().argmax(1) == targets).sum().float()
    return F.cross_entropy(logits, targets.long(), reduction="sum"), correct


# -------------------------------------------------------------------------------------- CUDA


def one_pass(h: Tensor, word: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with the gradient of the logits computed in the forward pass.

    Only one matrix of the logits' size is then kept for the backward pass. Logits and gradient have
    the type of h, and their rows are padded to W pieces, a multiple of ALIGNED. Targets below 0 do
    not count.
    """
    h = h if len(h) == len(targets) else h[: len(targets)]
    with torch.autocast(h.device.type, enabled=False):  # it would compute the softmax in fp32
        return OnePass.apply(h, word, bias, targets.long()[:, None])


class OnePass(torch.autograd.Function):
    """The loss and the number of correct predictions, for targets (M, 1)."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, word: Tensor, bias: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(h.dtype, torch.float32)
        ctx.pieces, ctx.types = len(word), (word.dtype, bias.dtype)
        word, bias = _aligned(word, bias.to(h.dtype))  # (W, E), (W,)
        logits = torch.addmm(bias, h, word.T)  # (M, W)
        probability = torch.softmax(logits, 1)  # (M, W)
        largest, prediction = logits.max(1, keepdim=True)  # (M, 1) each
        counts = (targets >= 0).to(h.dtype)  # (M, 1): 0 for a target that does not count
        target = targets.clamp(min=0)  # (M, 1)

        # The loss is log(sum of exponentials) - logit of the target. The logarithm is taken from
        # the largest probability, which is exp(largest) / sum. It is at least 1 / W, and its
        # rounding to bf16 changes a loss by at most 0.004.
        log_sum = largest - probability.gather(1, prediction).to(wide).log()  # (M, 1)
        losses = log_sum - logits.gather(1, target)  # (M, 1)

        # The gradient of the logits is their probability, minus 1 at the target. expm1(-loss) is
        # the target's probability - 1, without the rounding of that probability.
        gradient = probability.scatter_(1, target, torch.expm1(-losses).to(h.dtype))  # (M, W)
        correct = (prediction == targets).sum(dtype=wide)
        ctx.mark_non_differentiable(correct)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, word, gradient, counts)
        return (losses * counts).sum(), correct

    @staticmethod
    def backward(ctx: Any, d_total: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        native.refuse_second_derivative("vocabulary_loss")
        if d_total is None:
            return None, None, None, None
        h, word, gradient, counts = ctx.saved_tensors
        # Scale the rows of h instead of the gradient of the logits, which is far larger.
        scale = counts * d_total  # (M, 1)
        d_word = (gradient.T @ (h * scale))[: ctx.pieces].to(ctx.types[0])
        d_bias = (scale.T @ gradient)[0, : ctx.pieces].to(ctx.types[1])
        return (gradient @ word) * scale, d_word, d_bias, None


def _aligned(word: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The weights with W pieces, a multiple of ALIGNED. The added pieces have a probability of
    0."""
    more = -len(word) % ALIGNED
    if not more:
        return word, bias
    return F.pad(word, (0, 0, 0, more)), F.pad(bias, (0, more), value=-torch.inf)


# --------------------------------------------------------------------------------------- C++


def _vocabulary_loss(
    h: Tensor, word: Tensor, bias: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, the number of correct predictions, and the gradients of logits and bias."""
    V, M = len(word), len(targets)
    _, _, gradient, d_bias = _empty_results(h, word, bias, targets)
    d_bias.zero_()
    losses, hits = bias.new_zeros(2, M)
    torch.mm(h, word.T, out=gradient[:, :V])
    sizes = len(h), M, V, gradient.size(1)
    targets = targets.long().contiguous()
    if native.call("cross_entropy", h.dtype, gradient, bias, targets, losses, hits, d_bias, *sizes):
        raise IndexError(f"a target is not in 0 to {V - 1}")
    return losses.sum(), hits.sum(), gradient, d_bias


def _empty_results(
    h: Tensor, word: Tensor, bias: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = -(-len(word) // ALIGNED) * ALIGNED
    total, hits = bias.new_empty(()), bias.new_empty(())
    return total, hits, h.new_empty(len(h), wide), torch.empty_like(bias)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    h, word, _, _ = inputs
    _, correct, gradient, d_bias = output
    ctx.mark_non_differentiable(correct, gradient, d_bias)
    ctx.save_for_backward(h, word, gradient, d_bias)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_total: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    native.refuse_second_derivative("vocabulary_loss")
    h, word, gradient, d_bias = ctx.saved_tensors
    if d_total is None:
        return None, None, None, None
    gradient = gradient[:, : len(word)]
    # Scale h instead of the gradient of the logits, which is far larger.
    return (gradient @ word) * d_total, gradient.T @ (h * d_total), d_bias * d_total, None


_in_cpp = define(_vocabulary_loss, _empty_results)
differentiate(_in_cpp, _keep, _backward)
