"""Linear layers with three outlier features, multiplied in many ways: one (Table 5), and those of a decoder layer."""

from typing import Annotated

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import Batch, Count, Finite


class LinearLayer(Metric):
    """Milliseconds of each way to multiply, and how many times faster than 16 bits it is: medians with quartiles.

    All ways are timed in turn, in this process: beside others, no time is its own. tokens: rows of the input. seconds:
    how long a layer is timed at least.
    """

    name = "linear_layer"
    measured_by = "outliers.metrics.linear_layer.measure:LINEAR_LAYER"
    view = "outliers.metrics.linear_layer.view:speed_section"
    subject = None
    needs = ("way", "q1", "q3", "tokens", "device_name", "threads")
    timed = True

    tokens: Count = 512
    seconds: Annotated[Finite, Field(gt=0, le=86400)] = 3.0


class DecoderLayer(Metric):
    """Milliseconds of the projections of a decoder layer for a further token of each sequence, in some ways, and how
    many times faster than 16 bits each way is: medians with quartiles.

    batch: sequences, which are rows of the inputs. seconds: how long a layer is timed at least.
    """

    name = "decoder_layer"
    measured_by = "outliers.metrics.linear_layer.measure:DECODER_LAYER"
    view = "outliers.metrics.linear_layer.view:decoder_section"
    subject = "outliers.subjects.layer:DecoderLayer"
    needs = ("way", "q1", "q3", "batch", "layers", "device_name", "threads")
    timed = True

    batch: Batch = 1
    seconds: Annotated[Finite, Field(gt=0, le=86400)] = 3.0
