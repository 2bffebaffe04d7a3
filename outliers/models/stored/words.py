"""Weights as GPTQ and AWQ store them: codes (features, outputs) in words of 32 bits, with scales and zero points of
groups of features."""

import torch

# AutoAWQ stores the columns of a word in this order (Lin et al., 2023; `awq/utils/packing_utils.py`).
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
FIRST_VERSION = "gptq"  # of checkpoints, in which zero points are one less than what they stand for


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes in the last axis of words, the lowest bits first: (…, words) to (…, 32 / bits · words)."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def unpack_gptq(tensors: dict[str, torch.Tensor], fields: dict) -> torch.Tensor:
    """Words go down the features; a feature has the scale and the zero point of the group that `g_idx` says."""
    bits, scales = fields["bits"], tensors["scales"].float()
    codes = unpack_words(tensors["qweight"].T, bits).T
    shift = int(fields.get("checkpoint_format", FIRST_VERSION) == FIRST_VERSION)
    zeros = unpack_words(tensors["qzeros"], bits)[:, : scales.shape[1]] + shift
    groups = tensors["g_idx"].long() if "g_idx" in tensors else _groups(codes, fields)
    return ((codes - zeros[groups]).float() * scales[groups]).T.contiguous()


def unpack_awq(tensors: dict[str, torch.Tensor], fields: dict) -> torch.Tensor:
    """Words of four bits go along the outputs."""
    scales = tensors["scales"].float()
    codes, zeros = (_in_order(unpack_words(tensors[name], 4)) for name in ("qweight", "qzeros"))
    groups = _groups(codes, fields)
    return ((codes - zeros[groups]).float() * scales[groups]).T.contiguous()


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    return codes.unflatten(-1, (-1, len(AWQ_ORDER)))[..., AWQ_ORDER].flatten(-2)


def _groups(codes: torch.Tensor, fields: dict) -> torch.Tensor:
    """The group of each feature; a size of -1 stands for one group."""
    size = fields["group_size"]
    return torch.arange(len(codes), device=codes.device) // (size if size > 0 else len(codes))
