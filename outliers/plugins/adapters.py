"""Adapters of PEFT on layers that keep int8 codes alone: `LoraConfig(…)._register_custom_module(LAYERS)`."""

from peft.tuners import lora

from outliers.quantization.int8 import Int8Linear


class LoraInt8(lora.Linear):
    """A low-rank adapter beside an `Int8Linear`, whose codes do not change."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise ValueError: the sum of codes and an adapter would have to be quantized again."""
        raise ValueError(
            "an adapter cannot be merged into int8 codes; keep it beside them (save_pretrained writes it alone), or "
            "merge it into the exact model and quantize that"
        )


LAYERS = {Int8Linear: LoraInt8}
