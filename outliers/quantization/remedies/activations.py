"""Activations as integers of another number of bits, such as those of one role."""

from dataclasses import replace

from outliers.quantization.schemes import Scheme


def in_bits(scheme: Scheme, bits: float) -> Scheme:
    """A scheme with its activations in so many bits."""
    return replace(scheme, activations=replace(scheme.activations, format=f"int{bits:g}"))
