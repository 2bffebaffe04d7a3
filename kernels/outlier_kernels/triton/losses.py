"""The losses of predicted tokens from a head's logits: one program per prediction, which reads them once."""

import torch
import triton
import triton.language as tl

from outlier_kernels.states import DTYPES
from outlier_kernels.triton import launch

TOKENS = 2048  # tokens of the vocabulary read at once


def serves(logits: torch.Tensor) -> bool:
    return logits.dtype in DTYPES and logits.numel() > 0


def add(
    logits: torch.Tensor, start: int, targets: torch.Tensor, normalizers: torch.Tensor, target_logits: torch.Tensor
) -> None:
    """See `dispatch.add_logits`."""
    predictions, tokens = logits.shape
    launch(
        *(add_logits, (predictions,), logits, targets, normalizers, target_logits),
        *(start, tokens, *logits.stride(), targets.stride(0)),
        TOKENS=min(TOKENS, triton.next_power_of_2(tokens)),
    )


@triton.jit
def add_logits(
    logits,
    targets,
    normalizers,
    target_logits,
    start,
    tokens,
    row_stride,
    token_stride,
    target_stride,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    most, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        address = logits + token.to(tl.int64) * token_stride
        value = tl.load(address, mask=token < tokens, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(value))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(value - higher))
        most = higher
    before, log_sum = tl.load(normalizers + row), most.to(tl.float64) + tl.log(total.to(tl.float64))
    higher = tl.maximum(before, log_sum)
    tl.store(normalizers + row, higher + tl.log(tl.exp(before - higher) + tl.exp(log_sum - higher)))
    target = tl.load(targets + row * target_stride) - start
    if (target >= 0) & (target < tokens):
        tl.store(target_logits + row, tl.load(logits + target * token_stride).to(tl.float64))
