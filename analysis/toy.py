"""Do layers compose, integrate, or average? How a student's loss falls with its depth (2602.05970, section 5).

    python analysis/toy.py RESULTS                   the exponents of the groups in a folder, such as results/toy
    python analysis/toy.py OUT --train micro         first trains the groups of a size that OUT does not hold yet

    x_0 = N(input)        f_l(x) = relu(N(x) W_l + b_l)^2 V_l        N(x) = x / sqrt(mean(x^2) + eps)
    Euler: x_l = x_(l-1) + f_l(x_(l-1))     midpoint (RK2): x_l = x_(l-1) + g_l(x_(l-1) + f_l(x_(l-1)) / 2)

A teacher is deep; its layers correlate by rho: 1 tied, 0 independent. Students match its state N(x_L) (mse) or its
distribution (kl). All students of one depth are a group and train as one batched model; a finished group is kept.

J teachers, G = J x temperatures, K = G x seeds models; L blocks, B inputs, M width, F hidden units, V outputs.
"""

import argparse
import io
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar, nnls
from torch import Tensor

from sparsedepth.config.load import parse_yaml, yaml_text
from sparsedepth.files import atomic_folder, digest, write_json, write_text
from sparsedepth.store.checksums import is_complete, write_marker
from sparsedepth.store.packs import find_groups
from sparsedepth.store.run_record import TOYS
from sparsedepth.store.small_sample import mean_interval

CONFIG, MANIFEST, STUDENTS, CURVES = FILES = ("config.yaml", "manifest.json", "students.parquet", "curves.parquet")
"""Of a finished group: RESULTS/toys/<run_id>/, with a marker `complete` as runs have; or in a pack."""
AXES = ("rho", "teacher_seed", "temperature", "seed")
"""Lists of a group: its students are their product. The last varies fastest."""

REGIMES = {
    (0.0, "euler"): ("independent layers average their errors", 1),
    (0.0, "midpoint"): ("independent layers average their errors", 1),
    (1.0, "euler"): ("tied layers integrate a smooth flow, by Euler steps", 3),
    (1.0, "midpoint"): ("tied layers integrate a smooth flow, by midpoint steps", 4),
}
"""By rho and integrator: the regime and its exponent in the paper, of a converged student at low temperature."""
ALPHAS = (0.05, 12.0)
MIN_DEPTHS = 4
"""Three unknowns fit three depths exactly."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """All students of one depth. Defaults: the paper's."""

    n_layers: int = 6  # steps of the student; a midpoint step has two blocks
    d_model: int = 32
    d_ff: int | None = None  # None: 4 d_model
    vocab_size: int = 128
    teacher_layers: int = 128  # their output scales as 1 / sqrt(teacher_layers)
    integrator: str = "euler"
    target: str = "kl"  # with a head to learn; kl_given_head: with the teacher's; mse: its normed state
    rho: tuple[float, ...] = (0.0,)
    teacher_seed: tuple[int, ...] = (0, 1, 2)
    temperature: tuple[float, ...] = (1.0,)  # divides the teacher's logits; not for mse
    seed: tuple[int, ...] = (0,)  # of the students' first weights
    data_seed: int = 0  # of the inputs, which all students share
    batch_size: int = 1024
    n_steps: int = 40_000
    lr: float = 6e-4  # Adam's
    lr_depth_factor: float | None = None  # the rate is lr x this / sqrt(n_layers); None: lr at every depth
    decay_from: float = 1.0  # share of the steps after which the rate falls linearly
    decay_to: float = 0.1  # to this share of it
    test_batches: int = 10  # never trained on
    log_every: int = 500  # steps between two rows of the curves

    @property
    def run_id(self) -> str:
        """12 hex digits: a hash of all fields that differ from their default."""
        changed = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return digest({"toy_defaults": 1, **changed})

    @property
    def students(self) -> list[dict[str, Any]]:
        """Per student, in order: its rho, teacher_seed, temperature and seed."""
        product = itertools.product(*(getattr(self, name) for name in AXES))
        return [dict(zip(AXES, student, strict=True)) for student in product]

    def learning_rate(self, step: int) -> float:
        """Of step `step` (from 0): constant, then falling linearly from `decay_from` of the steps."""
        peak = self.lr if self.lr_depth_factor is None else self.lr * self.lr_depth_factor / math.sqrt(self.n_layers)
        start = self.decay_from * self.n_steps
        remaining = (self.n_steps - step) / (self.n_steps - start) if step >= start else 1.0
        return peak * (self.decay_to + (1 - self.decay_to) * remaining)


LATE = {"n_steps": 80_000, "decay_from": 0.8}
TEMPERATURES = tuple(float(f"{10 ** (power / 7.5 - 2):.4g}") for power in range(16))
SIZES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "paper": (
        {"n_layers": (6, 12, 16, 24, 32, 48), "rho": (0.0, 1.0)},
        [
            {"temperature": TEMPERATURES},
            {"target": "kl_given_head", "rho": (1.0,), "temperature": TEMPERATURES, "lr_depth_factor": 4.0, **LATE},
            {"target": "mse", "lr_depth_factor": 2.0, **LATE},
            {"target": "mse", "integrator": "midpoint", "n_layers": (3, 6, 8, 12, 16, 24), "lr_depth_factor": 2.0}
            | LATE,
        ],
    ),
    "micro": (
        {"n_layers": (3, 4, 6, 8, 12), "rho": (0.0, 1.0), "d_model": 16, "vocab_size": 64, "teacher_layers": 32}
        | {"batch_size": 128, "test_batches": 16, "log_every": 1000, "lr": 3e-3, "lr_depth_factor": 2.0}
        | {"decay_from": 0.5, "decay_to": 0.02},
        [
            {"target": "mse", "n_steps": 6000},
            {"target": "mse", "integrator": "midpoint", "n_layers": (2, 3, 4, 6), "n_steps": 6000},
            {"n_layers": (3, 4, 6, 12), "n_steps": 3000, "temperature": (0.05, 0.2, 1.0)},
        ],
    ),
    "tiny": (
        {"n_layers": (1, 2, 3, 4), "rho": (0.0, 1.0), "target": "mse", "d_model": 4, "teacher_layers": 8}
        | {"batch_size": 16, "n_steps": 60, "log_every": 30, "test_batches": 2, "lr": 0.01},
        [{}],
    ),
}
"""Fields of every group, and variants of them: the paper's (7.9e16 FLOP), results/toy (13 CPU minutes), seconds."""


def groups(size: str) -> list[Group]:
    """The variants of a size, each at its depths."""
    base, variants = SIZES[size]
    merged = [{**base, **variant} for variant in variants]
    return [Group(**{**values, "n_layers": depth}) for values in merged for depth in values["n_layers"]]


class Weights(NamedTuple):
    """W [L, K, M, F], b [L, K, 1, F], V [L, K, F, M] and the head H [K, M, V]."""

    fc: Tensor
    bias: Tensor
    proj: Tensor
    head: Tensor


def generator(*key: object) -> torch.Generator:
    """A random generator that is a function of a key such as ('teacher', seed) or ('inputs', seed, step)."""
    return torch.Generator().manual_seed(int.from_bytes(sha256(repr(key).encode()).digest()[:7]))


def final_state(weights: Weights, input_BM: Tensor, integrator: str = "euler") -> Tensor:
    """N(x_L) of every model on the same inputs, [K, B, M]."""
    blocks = iter(zip(weights.fc, weights.bias, weights.proj, strict=True))
    x_KBM = _norm(input_BM).expand(weights.fc.shape[1], -1, -1)
    for block in blocks:
        update_KBM = _branch(x_KBM, *block)
        x_KBM = x_KBM + (_branch(x_KBM + update_KBM / 2, *next(blocks)) if integrator == "midpoint" else update_KBM)
    return _norm(x_KBM)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _branch(x_KBM: Tensor, fc_KMF: Tensor, bias_K1F: Tensor, proj_KFM: Tensor) -> Tensor:
    return torch.bmm(torch.baddbmm(bias_K1F, _norm(x_KBM), fc_KMF).relu().square(), proj_KFM)


def uniform(source: torch.Generator, *shape: int, fan_in: int) -> Tensor:
    """Uniform in +-1/sqrt(fan in): PyTorch's default for a linear layer, as in the paper."""
    return torch.rand(shape, generator=source).mul_(2).sub_(1).div_(math.sqrt(fan_in))


def _blocks(source: torch.Generator, n: int, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    m, f = group.d_model, group.d_ff or 4 * group.d_model
    return (uniform(source, n, m, f, fan_in=m), uniform(source, n, 1, f, fan_in=m), uniform(source, n, f, m, fan_in=f))


def teacher(group: Group, rho: float, seed: int) -> tuple[Tensor, ...]:
    """W, b, V, H. The draws of layer l are sqrt(rho) shared + sqrt(1 - rho) own_l: each keeps its variance."""
    shared = _blocks(generator("teacher", seed, "shared"), 1, group)
    own = _blocks(generator("teacher", seed, "own"), group.teacher_layers, group)
    mixed = [math.sqrt(rho) * one + math.sqrt(1 - rho) * other for one, other in zip(shared, own, strict=True)]
    source, shape = generator("head", seed), (group.d_model, group.vocab_size)
    given = group.target == "kl_given_head"
    head = torch.randn(shape, generator=source) / math.sqrt(group.d_model) if given else None
    head = uniform(source, *shape, fan_in=group.d_model) if head is None else head
    return mixed[0], mixed[1], mixed[2] / math.sqrt(group.teacher_layers), head


class Training:
    """All students of a group, with their teachers and optimizer."""

    def __init__(self, group: Group, device: str = "cpu") -> None:
        self.group, self.device, self.step = group, device, 0
        drawn = [teacher(group, rho, seed) for rho in group.rho for seed in group.teacher_seed]
        fc, bias, proj, head = (list(parts) for parts in zip(*drawn, strict=True))
        stacked = [torch.stack(parts, dim=1).to(device) for parts in (fc, bias, proj)]
        self.teachers = Weights(*stacked, torch.stack(head).to(device))
        n_blocks = group.n_layers * (2 if group.integrator == "midpoint" else 1)
        starts = [_blocks(generator("student", seed), n_blocks, group) for seed in group.seed]
        copies = len(group.students) // len(group.seed)
        first = [torch.stack(parts, dim=1).repeat(1, copies, 1, 1) for parts in zip(*starts, strict=True)]
        given_KMV = self.teachers.head.repeat_interleave(len(group.students) // len(head), 0)
        head_KMV = given_KMV if group.target == "kl_given_head" else torch.zeros_like(given_KMV)
        self.students = Weights(
            first[0].to(device), first[1].to(device), torch.zeros_like(first[2], device=device), head_KMV
        )
        learned = self.students if group.target == "kl" else self.students[:3]
        self.optimizer = torch.optim.Adam([weight.requires_grad_() for weight in learned], lr=group.lr, fused=True)
        self.temperature_G11 = torch.tensor(group.temperature, device=device).repeat(len(head))[:, None, None]

    def inputs(self, *key: int | str) -> Tensor:
        """A batch of standard normal inputs, drawn on the CPU."""
        source = generator("inputs", self.group.data_seed, *key)
        return torch.randn(self.group.batch_size, self.group.d_model, generator=source).to(self.device)

    @torch.no_grad()
    def targets(self, input_BM: Tensor) -> Tensor:
        """What the students should match: log probabilities [G, B, V], or states [G, B, M]."""
        state_JBM = final_state(self.teachers, input_BM)
        if self.group.target == "mse":
            return state_JBM
        logits_GBV = torch.bmm(state_JBM, self.teachers.head).repeat_interleave(len(self.group.temperature), 0)
        return F.log_softmax(logits_GBV / self.temperature_G11, -1)

    def losses(self, input_BM: Tensor, target: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The loss of each student on a batch, [K]: mean squared error, or KL(teacher || student)."""
        state_KBM = final_state(self.students, input_BM, self.group.integrator)
        per_target = (-1, len(self.group.seed))
        target_G1BX = target.to(dtype).unsqueeze(1)
        if self.group.target == "mse":
            return (state_KBM.to(dtype).unflatten(0, per_target) - target_G1BX).square().mean((-2, -1)).flatten()
        logits_GSBV = torch.bmm(state_KBM, self.students.head).to(dtype).unflatten(0, per_target)
        if self.group.target == "kl_given_head":
            logits_GSBV = logits_GSBV / self.temperature_G11.unsqueeze(1)
        return (target_G1BX.exp() * (target_G1BX - F.log_softmax(logits_GSBV, -1))).sum(-1).mean(-1).flatten()

    def take_step(self) -> Tensor:
        """One step of the sum of losses, in which no student sees another; returns the losses before it, [K]."""
        self.optimizer.param_groups[0]["lr"] = self.group.learning_rate(self.step)
        input_BM = self.inputs(self.step)
        losses_K = self.losses(input_BM, self.targets(input_BM))
        self.optimizer.zero_grad(set_to_none=True)
        losses_K.sum().backward()
        self.optimizer.step()
        self.step += 1
        return losses_K.detach()

    @torch.no_grad()
    def test_losses(self) -> Tensor:
        """The mean loss of each student on the test batches, [K], in double precision: a KL near 0 is a difference."""
        batches = [self.inputs("test", index) for index in range(self.group.test_batches)]
        losses = [self.losses(input_BM, self.targets(input_BM), torch.float64) for input_BM in batches]
        return torch.stack(losses).mean(0)


def train(group: Group, results: Path, device: str) -> None:
    """Train a group and keep its record."""
    clock, training, curves = time.perf_counter(), Training(group, device), []
    while training.step < group.n_steps:
        train_losses = training.take_step()
        if training.step % group.log_every == 0 or training.step == group.n_steps:
            pairs = zip(train_losses.tolist(), training.test_losses().tolist(), strict=True)
            for number, (train_loss, test_loss) in enumerate(pairs):
                known = {"train_loss": train_loss, "test_loss": test_loss}
                losses = {name: loss if math.isfinite(loss) else math.nan for name, loss in known.items()}
                row = {"step": training.step, "student": number, "lr": group.learning_rate(training.step - 1)}
                curves.append(row | losses)
    last = curves[-len(group.students) :]
    students = [
        axes | {name: row[name] for name in ("student", "test_loss", "train_loss")}
        for axes, row in zip(group.students, last, strict=True)
    ]
    seconds = round(time.perf_counter() - clock, 3)
    config = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(group).items()}
    with atomic_folder(results / TOYS / group.run_id) as folder:
        write_text(folder / CONFIG, yaml_text(config))
        write_json(folder / MANIFEST, {"device": device, "seconds": seconds})
        pd.DataFrame(students).to_parquet(folder / STUDENTS)
        pd.DataFrame(curves).to_parquet(folder / CURVES)
        write_marker(folder, group.run_id, FILES)


def read_students(results: Path) -> pd.DataFrame:
    """Every student of the finished groups in a folder or pack, with the fields of its group. Raises DamagedRun."""
    frames = [pd.DataFrame(columns=[one.name for one in fields(Group)])]
    for files in find_groups(results, TOYS):
        config = parse_yaml(files.read(CONFIG).decode(), CONFIG)
        shared = {name: value for name, value in config.items() if name not in AXES} | {"run_id": files.marker.run_id}
        frames.append(pd.read_parquet(io.BytesIO(files.read(STUDENTS))).assign(**shared))
    return pd.concat(frames[1:] or frames, ignore_index=True)


class PowerLaw(NamedTuple):
    """L(l) = c l^-alpha + rest, and the slope -d log L / d log l, which is alpha if rest = 0."""

    alpha: float | None
    """None at an end of ALPHAS: not identified."""
    c: float
    rest: float
    slope: float


def fit_power_law(depth_L: np.ndarray, loss_L: np.ndarray) -> PowerLaw:
    """Least squares on relative errors, because losses span decades. At fixed alpha it is linear in c and rest
    (non-negative least squares), so only alpha is searched, over all of ALPHAS: no start, no local optimum."""
    shallowest = depth_L.min()

    @cache
    def linear(alpha: float) -> tuple[np.ndarray, float]:
        return nnls(np.stack(((depth_L / shallowest) ** -alpha / loss_L, 1 / loss_L), axis=1), np.ones_like(loss_L))

    slope = float(-np.polyfit(np.log(depth_L), np.log(loss_L), 1)[0])
    grid = np.geomspace(*ALPHAS, 60)
    best = int(np.argmin([linear(alpha)[1] for alpha in grid]))
    if best in (0, len(grid) - 1):
        return PowerLaw(None, float(np.exp(np.mean(np.log(loss_L * depth_L**slope)))), 0.0, slope)
    bounds = (grid[best - 1], grid[best + 1])
    alpha = float(minimize_scalar(lambda a: linear(a)[1], bounds=bounds, method="bounded", options={"xatol": 1e-9}).x)
    (c, rest), _ = linear(alpha)
    return PowerLaw(alpha, float(c * shallowest**alpha), float(rest), slope)


def exponents(students: pd.DataFrame) -> pd.DataFrame:
    """A row per setting with MIN_DEPTHS depths: alpha and slope with Student's intervals over teachers. Teachers
    without a loss at some depth are left out."""
    settings = [one.name for one in fields(Group) if one.name not in ("n_layers", "teacher_seed", "seed")]
    rows = []
    for key, alike in students.groupby(settings, dropna=False, sort=True):
        assert isinstance(key, tuple)
        by_teacher = alike.groupby(["n_layers", "teacher_seed"])["test_loss"].mean().unstack("teacher_seed")
        whole = by_teacher.loc[:, (by_teacher > 0).all()]
        if len(whole) < MIN_DEPTHS or whole.empty:
            continue
        fits = [fit_power_law(whole.index.to_numpy(float), whole[one].to_numpy()) for one in whole]
        row = dict(zip(settings, key, strict=True)) | {"teachers": len(fits), "depths": tuple(whole.index)}
        row["alpha"] = mean_interval([one.alpha for one in fits if one.alpha is not None])
        if any(one.alpha is None for one in fits):
            row["alpha"] = (None, None, None)
        rows.append(row | {"slope": mean_interval([one.slope for one in fits])})
    return pd.DataFrame(rows)


def sentences(fitted: pd.DataFrame) -> list[str]:
    """A line per setting, the paper's regime and whether its exponent lies in the interval."""
    first = ["target", "integrator", "rho", "temperature"]
    others = [one.name for one in fields(Group) if one.name in fitted.columns and one.name not in first]
    names: list[str] = []
    for name in (*first, *others):  # only fields that tell settings apart
        if len(fitted.drop_duplicates([*names, name])) > (len(fitted.drop_duplicates(names)) if names else 1):
            names.append(name)
    return [_sentence(row, names) for row in fitted.to_dict("records")]


def _sentence(row: dict[str, Any], names: Sequence[str]) -> str:
    label = ", ".join(f"{name}={f'{row[name]:g}' if isinstance(row[name], float) else row[name]}" for name in names)
    alpha = "not identified" if row["alpha"][0] is None else _interval(*row["alpha"])
    text = f"{label or 'all students'}: alpha {alpha}, slope {_interval(*row['slope'])} ({row['teachers']} teachers, "
    text += f"depths {row['depths'][0]} to {row['depths'][-1]})"
    _, lo, hi = row["alpha"]
    if lo is None or (row["rho"], row["integrator"]) not in REGIMES:
        return text
    regime, expected = REGIMES[row["rho"], row["integrator"]]
    return f"{text}; {regime}: {expected} is {'inside' if lo <= expected <= hi else 'excluded'}"


def _interval(mean: float, lo: float | None, hi: float | None) -> str:
    return f"{mean:.2f} " + ("(no interval)" if lo is None else f"[{lo:.2f}, {hi:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--train", choices=SIZES, help="train the groups of this size that the folder does not hold")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    wanted = groups(given.train) if given.train else []
    missing = [group for group in wanted if not is_complete(given.results / TOYS / group.run_id)]
    for number, group in enumerate(missing, start=1):
        name = f"{group.target} {group.integrator}, {group.n_layers} layers, {len(group.students)} students"
        print(f"[{number}/{len(missing)}] {name}", flush=True)
        train(group, given.results, given.device)
    try:
        fitted = exponents(read_students(given.results))
    except ValueError as error:
        parser.error(str(error))
    if fitted.empty:
        parser.error(f"{str(given.results)!r} holds no toy networks of {MIN_DEPTHS} depths; train some: --train micro")
    print("test loss = c / n_layers^alpha + rest; [95% interval over teachers]; slope: alpha if rest = 0")
    print("\n".join(f"  {line}" for line in sentences(fitted)))


if __name__ == "__main__":
    main()
