"""The reference for the losses of predicted tokens, accumulated over parts of the vocabulary."""

import torch


def add(
    logits: torch.Tensor, start: int, targets: torch.Tensor, normalizers: torch.Tensor, target_logits: torch.Tensor
) -> None:
    """See `dispatch.add_logits`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    inside = (targets >= start) & (targets < start + logits.shape[1])
    candidates = logits.gather(1, (targets - start).clamp(0, logits.shape[1] - 1))
    torch.where(inside, candidates.double(), target_logits, out=target_logits)
    largest = logits.amax(1, keepdim=True)
    log_sum = largest.double() + (logits - largest).exp_().sum(1, keepdim=True).double().log()
    torch.logaddexp(normalizers, log_sum, out=normalizers)
