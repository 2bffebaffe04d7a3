"""`python -m outliers.plugins.harness`: lm-eval's own command line, with `--model outliers`.

lm-eval finds models in a table of its own and has no entry points, so ours has to be imported. This program does so,
and hands its arguments to lm-eval unchanged. In Python `import outliers.plugins.harness` is enough, before
`lm_eval.simple_evaluate(model="outliers", …)`.

Example:

`python -m outliers.plugins.harness --model outliers --model_args pretrained=gpt2,scheme=absmax+hadamard --tasks piqa`
"""

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import outliers.plugins.loader  # noqa: F401 -- so that `--model hf` reads what was saved with our layers
from outliers.errors import UserError
from outliers.metrics.zeroshot import harness_arguments
from outliers.models.load import load_model, load_tokenizer
from outliers.terminal.command import reporting_mistakes
from outliers.variants.quantized import Quantized

DEFAULT_DEVICE = "cuda:0"  # of lm-eval's command line, whether there is one or not


@register_model("outliers")
class OutliersLM(HFLM):
    """A model under a scheme, as `outliers.zeroshot` measures it: a sequence at a time, likelihoods in float32.

    Args:
        pretrained, revision, dtype, device: as for `outliers.load_model`.
        scheme: as a variant says it, with remedies and options: "absmax+hadamard", "llm.int8+skip=ffn_out", or
            "@plan.yaml".

    Raises:
        UserError: an argument is unknown, or batches are asked for, on whose size some schemes depend; as `load_model`
            and `quantize`.
    """

    def __init__(
        self,
        pretrained: str,
        scheme: str = "fp32",
        revision: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **unknown,
    ):
        if unknown:
            known = "pretrained, scheme, revision, dtype, device"
            raise UserError(f"unknown {', '.join(sorted(unknown))} in --model_args; expected {known}")
        if str(batch_size) != "1":
            raise UserError(
                f"--batch_size is {batch_size}; expected 1, because some schemes depend on the content of a batch"
            )
        if device is None or (device == DEFAULT_DEVICE and not torch.cuda.is_available()):
            device = "cpu"
        variant = Quantized.read(scheme.split("+"))
        model = load_model(pretrained, dtype, device, revision)
        with variant.on(model) as changed:
            super().__init__(**harness_arguments(changed, load_tokenizer(pretrained, revision)))


if __name__ == "__main__":
    with reporting_mistakes():
        cli_evaluate()
