"""`python -m outliers.origins`: what writes a feature, which norms let it through, and what reads it.

Account for features: the heads, neurons and biases that write them, layer by layer, and the projections that read them.

Prints what writes each feature, what takes it back, which norms hide it, and what the model loses where projections do
without it; writes rows, tables and the life lines to results/origins/NAME. Run again, it goes on where it stopped.

Examples:

`python -m outliers.origins pocket/gpt2-1.7m`

`python -m outliers.origins smollm2-135m --features 247,507 --text c4 --block 512 --blocks 4`

`python -m outliers.origins smollm2-135m --features 247 --by readers --place k,up,norm`
"""

from outliers.commands import measuring
from outliers.specification.kinds import Account
from outliers.terminal.command import run

origins = measuring("origins", Account, __doc__)

if __name__ == "__main__":
    run(origins)
