"""The Python interface: `import sparsedepth as sd; sd.best("results/mine")`. Each call has the options of the command
of its name as keywords, and returns the record that the command prints.

    read      best, query, ask (`query --ask`), effects, judge, recipe (`recipe derive`), scaling (`scaling fit`)
    look      status
    draw      plot, report
    train     plan, train, sweep
    models    measure, evaluate, export
    others    import_runs (`import`), pack

Rows are a QueryResult or an Answer, of which `frame()` makes a DataFrame; `best` returns one. Progress goes to stderr,
nothing is printed. User errors (exit code 2) are ValueErrors with the same text. Several folders are a list, KEY=VALUE
options may be a mapping, and so may the content of a YAML file. Only the command line offers --on slurm and `best
--again`."""

from sparsedepth.cli.evaluate import EvaluateCommand
from sparsedepth.cli.exchange import ExportCommand, ImportCommand, PackCommand
from sparsedepth.cli.figures import PlotCommand, ReportCommand
from sparsedepth.cli.judge import JudgeCommand
from sparsedepth.cli.measure import MeasureCommand
from sparsedepth.cli.option import call
from sparsedepth.cli.plan import PlanCommand
from sparsedepth.cli.read import AskCommand, BestCommand, EffectsCommand, SqlCommand
from sparsedepth.cli.recipe import RecipeCommand
from sparsedepth.cli.scaling import FitOptions
from sparsedepth.cli.status import StatusCommand
from sparsedepth.cli.train_sweep import SweepCommand, TrainCommand

ask = call(AskCommand)
best = call(BestCommand)
effects = call(EffectsCommand)
evaluate = call(EvaluateCommand)
export = call(ExportCommand)
import_runs = call(ImportCommand)
judge = call(JudgeCommand)
measure = call(MeasureCommand)
pack = call(PackCommand)
plan = call(PlanCommand)
plot = call(PlotCommand)
query = call(SqlCommand)
recipe = call(RecipeCommand)
report = call(ReportCommand)
scaling = call(FitOptions)
status = call(StatusCommand)
sweep = call(SweepCommand)
train = call(TrainCommand)
