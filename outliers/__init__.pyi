# Of the tables in __init__.py, by scripts/stubs.py: public names, as type checkers and editors see them.

from outlier_kernels.formats import Quantizer as Quantizer

from outliers import plot as plot
from outliers.errors import UserError as UserError
from outliers.metrics.ablations import ablate as ablate
from outliers.metrics.origins.observe import origins as origins
from outliers.metrics.perplexity.measure import perplexities as perplexities
from outliers.metrics.perplexity.measure import perplexity as perplexity
from outliers.metrics.training.watch import watch as watch
from outliers.models.hooks import hooks as hooks
from outliers.models.load import load_model as load_model
from outliers.models.load import load_tokenizer as load_tokenizer
from outliers.models.names import pocket_models as pocket_models
from outliers.models.variant import Variant as Variant
from outliers.plugins.loader import OutliersConfig as OutliersConfig
from outliers.presets.cells import Cells as Cells
from outliers.presets.damage import damage as damage
from outliers.presets.plan import plan as plan
from outliers.presets.readers import readers as readers
from outliers.presets.super_weights import super_weights as super_weights
from outliers.quantization.caches import cache as cache
from outliers.quantization.calibration import Calibration as Calibration
from outliers.quantization.calibration import calibrate as calibrate
from outliers.quantization.convert import quantize as quantize
from outliers.quantization.plans.exports import export as export
from outliers.quantization.plans.plan import Plan as Plan
from outliers.quantization.plans.plan import read_plan as read_plan
from outliers.quantization.schemes import SCHEMES as SCHEMES
from outliers.quantization.schemes import Scheme as Scheme
from outliers.quantization.store import load_int8 as load_int8
from outliers.quantization.store import load_quantized as load_quantized
from outliers.quantization.store import save_quantized as save_quantized
from outliers.quantization.transforms import Transform as Transform
from outliers.runs.callback import OutlierCallback as OutlierCallback
from outliers.runs.frame import frame as frame
from outliers.runs.run import run as run
from outliers.runs.run import sweep as sweep
from outliers.specification.kinds import Emergence as Emergence
from outliers.specification.kinds import Experiment as Experiment
from outliers.text.blocks import load_text as load_text
from outliers.tracing.compare import compare as compare
from outliers.tracing.masks import masks as masks
from outliers.tracing.result import Trace as Trace
from outliers.tracing.states import hidden_states as hidden_states
from outliers.tracing.table4 import table4_row as table4_row
from outliers.tracing.trace import trace as trace
from outliers.training.layers import train_int8 as train_int8
from outliers.variants.ablated import Ablated as Ablated
from outliers.variants.ablated import Intervention as Intervention
from outliers.variants.plant import plant as plant
from outliers.variants.planted import Planted as Planted
from outliers.variants.quantized import Quantized as Quantized
from outliers.variants.together import Together as Together
from outliers.variants.written import variant as variant

__version__: str
