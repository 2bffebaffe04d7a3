"""`python -m outliers.origins`: what writes a feature, which norms hide it, what reads it, and which weights matter.

Account for features: the heads, neurons and biases that write them, the projections that read them, single weights.

Prints what writes each feature, what takes it back, which norms hide it, what the model loses where projections do
without it, which single weights carry the model beside controls, what becomes of massive activations and sinks
without what makes them, and which channels of keys they make large; writes rows, tables and figures to
results/origins/NAME. Run again, it goes on where it stopped.

Examples:

`python -m outliers.origins pocket/gpt2-1.7m`

`python -m outliers.origins smollm2-135m --features 247,507 --text c4 --block 512 --blocks 4`

`python -m outliers.origins smollm2-135m --features 247 --by readers --place k,up,norm`

`python -m outliers.origins smollm2-135m --by weights --blocks 4 --block 512`
"""

from outliers.commands import measuring
from outliers.specification.kinds import Account
from outliers.terminal.command import run

origins = measuring("origins", Account, __doc__)

if __name__ == "__main__":
    run(origins)
