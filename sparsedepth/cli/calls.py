"""The Python interface: `import sparsedepth as sd; sd.best("results/mine")`. Each call has the options of the command
of its name as keywords, and returns what the command prints.

Progress goes to stderr. User errors (exit code 2) are ValueErrors with the same text. Several folders are a list,
KEY=VALUE options may be a mapping, and so may the content of a YAML file. Only the command line offers `plan`,
--on slurm and `best --again`."""

from sparsedepth.cli import option
from sparsedepth.cli.figures import PlotCommand
from sparsedepth.cli.measure import MeasureCommand
from sparsedepth.cli.read import BestCommand
from sparsedepth.cli.recipe import RecipeCommand
from sparsedepth.cli.train_sweep import SweepCommand, TrainCommand

best = option.call(BestCommand)
measure = option.call(MeasureCommand)
plot = option.call(PlotCommand)
recipe = option.call(RecipeCommand)
sweep = option.call(SweepCommand)
train = option.call(TrainCommand)
