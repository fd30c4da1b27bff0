"""`sparsedepth init`: write a commented template, which runs unchanged in minutes on a laptop.

Every commented line '# key: value' is valid: without its '# ' the file still validates.
"""

from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

SWEEP = """\
# A sweep: one question, the configurations that answer it, and their seeds.
#   sparsedepth plan {file}                          what it costs
#   sparsedepth sweep {file} --out results/my-sweep   run it; run it again to resume
#   sparsedepth recipe results/my-sweep              what it found
# Every field of a run is explained by `sparsedepth schema`, every key of a sweep by `sparsedepth schema sweep`.
# extends: other.yaml             # start from another file; keys given here replace its keys
name: my-sweep
question: Does LayerNorm Scaling help 6 layers more than 3?
hypothesis: It lowers the loss of the deeper model, and hardly that of the shallower one.
matched: tokens                   # compared runs share this: tokens, steps, params_total, params_active or flops
objectives: [val_loss]            # quantities to rank by; tuning uses the first
base:                             # shared by all runs; `preset: llama-130m` starts from a paper's model
  corpus: stdlib                  # or your text: a .txt, .jsonl or .parquet file, a folder, hub:NAME
  tokenizer: byte                 # or bpe:8192, trained on the corpus (then vocab_size: 8192)
  d_model: 32                     # width; d_ff follows from it
  n_heads: 2
  seq_len: 64                     # tokens of context
  batch_tokens: 512               # tokens per step = sequences x seq_len
  train_tokens: 16384             # total tokens = steps x batch_tokens
  lr: 3.0e-3
  warmup_frac: 0.1                # share of the steps
  weight_decay: 0.1
  precision: fp32                 # auto: bf16 on a GPU that supports it
  observe_every: 8
  val_tokens: 2048                # held-out tokens for the loss; the next two are for the scores
  measure_tokens: 512
  fit_tokens: 1024
  permutation_pairs: 8
space:                            # axes, crossed
  n_layers: [3, 6]
  depth_scale: [none, lns]
# tune: {{lr: [1.0e-3, 3.0e-3, 9.0e-3]}}   # re-tune lr for each configuration
tuning_seeds: 3                   # for `tune`: separate seeds 101, 102, 103; as many as `seeds`
# exclude: [{{n_layers: 3, depth_scale: lns}}]   # configurations to skip
# constraints: {{params_total: 5.0e+7}}   # upper bounds: params_total, params_active, flops_per_token, train_flops
seeds: 3                          # replicates 0, 1, 2 of each configuration; an interval needs three
# scales: {{small: {{base: {{train_tokens: 8192}}, seeds: 1}}}}   # other sizes of the sweep: --scale small
"""

RUN = """\
# A run: one model, trained and measured.
#   sparsedepth train {file} --out results/my-runs   run it again to resume; --set lr=1e-3 changes a field
#   sparsedepth sweep --vary n_layers=3,6 --seeds 3 --base {file} --out results/my-sweep
# Every field is explained by `sparsedepth schema`; omitted fields have defaults.
# preset: llama-60m                # fields of a paper's model; fields given here override them
# extends: other.yaml              # start from another file; keys given here replace its keys
corpus: stdlib                     # or your text: a .txt, .jsonl or .parquet file, a folder, hub:NAME
tokenizer: byte                    # or bpe:8192, trained on the corpus
vocab_size: 264                    # at least the tokenizer's; 8192 with bpe:8192

n_layers: 6
d_model: 32                        # width
n_heads: 2
# n_kv_heads: 1                    # key/value heads (GQA); default n_heads
# d_ff: 96                         # width of the SwiGLU; default 8/3 d_model
seq_len: 64                        # tokens of context
norm: pre                          # pre, post, sandwich, peri, mix, deepnorm or keel
# depth_scale: lns                 # LayerNorm Scaling: norms of block l times 1/sqrt(l)
# weight_density: 0.5              # share of weights that are not zero
# qk_norm: true

train_tokens: 16384                # total tokens = steps x batch_tokens
batch_tokens: 512                  # tokens per step = sequences x seq_len
lr: 3.0e-3                         # peak; linear warm-up, then cosine
warmup_frac: 0.1                   # share of the steps
weight_decay: 0.1
grad_clip: 1.0
seed: 0
precision: fp32                    # auto: bf16 on a GPU that supports it

observe_every: 8                   # steps between two observations of the residual stream
val_tokens: 2048                   # held-out tokens for the loss; the next two are for the scores
measure_tokens: 512
fit_tokens: 1024
permutation_pairs: 8
# measures: [usefulness, loss, weights, variance]
"""

TOY = """\
# A toy: students of several depths learn from teachers that need a known depth.
#   sparsedepth toy {file} --out results/my-toy      run it again to resume
# Every field of the base is explained by `sparsedepth schema toy`.
# extends: other.yaml              # start from another file; keys given here replace its keys
name: my-toy
question: With what exponent does a student's loss fall with its depth, under tied and under independent teachers?
hypothesis: About 1 for independent layers (rho 0), more for tied ones (rho 1) once the student has converged.
n_layers: [1, 2, 3, 4]             # depths of the students; an exponent needs four
base:
  target: mse                      # or kl, kl_given_head: the teacher's distribution
  rho: [0, 1]                      # correlation of the teacher's layers: 1 = tied, 0 = independent
  teacher_seed: [0, 1, 2]          # teachers; an interval needs three
  d_model: 8
  teacher_layers: 32
  batch_size: 64
  n_steps: 500
  lr: 0.01
  decay_from: 0.8                  # share of the steps after which lr falls
  log_every: 100
  test_batches: 4
# variants: [{{integrator: euler}}, {{integrator: midpoint}}]   # groups of fields, each crossed with n_layers
"""

IMPORT = """\
# An import: maps the columns of a third-party table of training runs to the fields of a run.
#   sparsedepth import TABLE.csv --map {file} --out results/theirs
# Fields are listed by `sparsedepth schema`, quantities by `sparsedepth metrics`. A field that is not named is unknown
# (NULL); no default is filled in. Put column names with special characters in backticks: "`D/N` * 2".
source: who made these runs, and where the table comes from
# where: batch_size == 64          # rows to import: < <= > >= == != and, or, not; text: arch == 'llama'
fields:                            # field: a column of your table, or a formula of columns; change these
  n_layers: depth                  # a column
  d_model: width
  train_tokens: {{of: tokens, unit: billion}}   # thousand, million, billion, percent, bit, minute, hour
  params_total: params
  batch_tokens: batch_size * 2048  # numbers, columns, + - * / **, ln log2 log10 exp sqrt round abs
  lr: lr
  norm: {{of: norm_type, values: {{rms_pre: pre, rms_post: post}}}}   # the table's value: ours
  val_loss: loss                   # nat/token; {{of: loss, unit: bit}} where the table has bits
  usefulness: {{of: useful, optional: true}}    # NULL where the table has no value
# constants: {{seq_len: 2048, corpus: c4}}      # the same in every row
# cluster: run_name                # column (or list) that identifies a training run with several rows
# tuned: [lr]                      # tuned fields: each configuration has its best value
# missing: leave_out               # skip rows without a value; default refuse
"""

TEMPLATES = {"sweep": SWEEP, "run": RUN, "toy": TOY, "import": IMPORT}
"""By kind; {file} stands for the file's name."""


def init(
    kind: Annotated[Literal["sweep", "run", "toy", "import"], typer.Argument(help="what the file defines")] = "sweep",
    file: Annotated[Path | None, typer.Argument(help="file to write; default ./KIND.yaml")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="same as FILE")] = None,
) -> None:
    """Write a commented template of a sweep, run, toy or import. It runs unchanged in minutes on a laptop."""
    from sparsedepth.files import write_bytes

    if file and out:
        raise ValueError(f"both {file} and -o {out} are given; give one file to write")
    path = file or out or Path(f"{kind}.yaml")
    if path.exists():
        raise ValueError(f"{path} already exists and is not overwritten; give another file name")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it, or give another file name")
    shown = quote(str(path))
    write_bytes(path, TEMPLATES[kind].format(file=shown).encode())
    command = {"sweep": "sweep", "run": "train", "toy": "toy", "import": "import TABLE.csv --map"}[kind]
    price = f"  sparsedepth plan {shown}\n" if kind == "sweep" else ""
    print(f"{path} written. Edit it, then run\n{price}  sparsedepth {command} {shown} --out results/my-{kind}")
