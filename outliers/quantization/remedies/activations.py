"""Integer activations of another width, for example at one role."""

from dataclasses import replace

from outliers.quantization.schemes import Scheme


def in_bits(scheme: Scheme, bits: float) -> Scheme:
    """Return a scheme with integer activations of `bits` bits."""
    return replace(scheme, activations=replace(scheme.activations, format=f"int{bits:g}"))
