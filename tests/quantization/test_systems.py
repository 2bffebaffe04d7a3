"""Schemes of serving systems: QServe's codes within int8, groups of the others, and activations by role."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outlier_kernels import dispatch, reference
from outlier_kernels.formats import Quantizer, large_groups

from outliers.quantization.fields import row_fields
from outliers.quantization.schemes import get_scheme
from tests.kernels.test_kernels import of_finite_floats
from tests.small_models import make_model

GROUP = 16
FEATURES = 96


@given(of_finite_floats(3, FEATURES), st.sampled_from(["group-8", "group-32", "row", "tensor"]))
def test_no_code_of_qserve_leaves_int8(values, granularity):
    """Nor is one more than half a step, 8, beyond the code of its row; a rounded step may clip more."""
    found = reference.quantize(values.double(), Quantizer("int4-in-int8", granularity))
    largest = values.double().abs().amax() if granularity == "tensor" else values.double().abs().amax(1, keepdim=True)
    exact = (values.double() / (largest / 119).clamp(min=1e-300)).round()
    assert found.codes.dtype == torch.int8
    assert found.codes.min() >= -127
    assert (found.codes.double().abs() - exact.abs()).max() <= 8
    assert (found.codes.double() - exact).abs().max() <= 16


def test_the_kernels_of_int8_multiply_for_qserve():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    scheme = get_scheme("qserve-g32")
    made = dispatch.quantize(weight, scheme.weights)
    assert made.has_exact_sums
    assert dispatch.backend_of(made, scheme.activations).row_name == "cpu"
    assert scheme.has_exact_sums


def test_groups_of_fireq_reach_from_the_largest_to_the_least():
    """Scales of e4m3 span 2^17: with a power of two of the whole weight, none of a trained one is lost."""
    weight = torch.tensor([[1e-3] * 8 + [40.0] * 8])
    found = reference.quantize(weight, Quantizer("int4-e4m3", "group-8"))
    assert found.dequantize()[0].tolist() == pytest.approx([1e-3] * 8 + [40.0] * 8, rel=0.07)
    tiny = reference.quantize(weight * 1e-30, Quantizer("int4-e4m3", "group-8"))
    assert torch.equal(tiny.codes, found.codes)


def test_how_many_groups_of_comet_have_eight_bits():
    """Less than a fifth, but one; of 4,096 features in groups of 128 six of 32."""
    assert [large_groups(groups) for groups in (1, 4, 9, 10, 24, 32)] == [1, 1, 1, 2, 4, 6]
    x = torch.randn(5, 10 * GROUP, generator=torch.Generator().manual_seed(0))
    codes = reference.quantize(x, Quantizer("int4-int8", f"group-{GROUP}")).codes.view(5, 10, GROUP).abs()
    assert torch.equal(codes.amax(-1), torch.tensor([127] * 2 + [7] * 8).expand(5, 10).to(torch.int8))


def test_activations_in_other_bits_at_a_role():
    scheme = get_scheme("w4a4+activations=8@ffn_out")
    assert str(scheme.at("ffn_out").activations) == "int8 row absmax"
    assert str(scheme.at("attn_in").activations) == "int4 row absmax"
    assert get_scheme("w4a4+activations=8").at("attn_in").description == get_scheme("w4a8").description
    fields = row_fields(get_scheme("flexq-g16"), make_model("gpt2"))  # of 32 features, and 128 in the last projection
    assert fields["activation_bits"] == round((3 * 32 * 7 + 128 * 9) / (3 * 32 + 128), 4)
    assert fields["weight_bits"] == 7
