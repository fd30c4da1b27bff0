"""A group of toy students as one batched model, against training them one by one.

    python benchmarks/toy.py --layers 6 12 24 48 --temperatures 16 --steps 3 --repeats 3 --threads 1
    python benchmarks/toy.py --quick

One by one, as in the paper: ordinary modules and autograd, one student at a time, with its own run of the teacher at
every step. Both start from the same weights, see the same inputs, and must agree in every loss. They take turns, in
alternating order; a ratio is of times of one repeat, and the spread is its range.
"""

import argparse
import statistics
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.toy.config import ToyConfig
from sparsedepth.toy.network import Students, Weights, student_axes
from sparsedepth.toy.training import Group

TOLERANCE = 1e-5


class Block(nn.Module):
    def __init__(self, weights: Weights, block: int, model: int) -> None:
        super().__init__()
        f, m = weights.proj.shape[-2:]
        self.c_fc, self.c_proj = nn.Linear(m, f), nn.Linear(f, m, bias=False)
        with torch.no_grad():
            self.c_fc.weight.copy_(weights.fc[block, model].T)
            self.c_fc.bias.copy_(weights.bias[block, model, 0])
            self.c_proj.weight.copy_(weights.proj[block, model].T)

    def forward(self, x_BM: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(F.rms_norm(x_BM, x_BM.shape[-1:]))) ** 2)


class Network(nn.Module):
    """One student, as ordinary modules."""

    def __init__(self, weights: Weights, model: int, midpoint: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(weights, block, model) for block in range(len(weights.fc)))
        self.head = nn.Linear(weights.head.shape[1], weights.head.shape[2], bias=False)
        self.midpoint = midpoint
        with torch.no_grad():
            self.head.weight.copy_(weights.head[model].T)

    def forward(self, x_BM: Tensor) -> Tensor:
        x_BM = F.rms_norm(x_BM, x_BM.shape[-1:])
        blocks = iter(self.blocks)
        for block in blocks:
            update_BM = block(x_BM)
            x_BM = x_BM + (next(blocks)(x_BM + update_BM / 2) if self.midpoint else update_BM)
        return F.rms_norm(x_BM, x_BM.shape[-1:])


def weights_of(students: Students) -> Weights:
    return Weights(students.fc_LKMF, students.bias_LK1F, students.proj_LKFM, students.head_KMV)


def train_alone(group: Group, number: int, n_steps: int) -> list[float]:
    """The training losses of one student of a new group, trained alone."""
    config, axes = group.config, student_axes(group.config)[number]
    at = config.rho.index(axes["rho"]) * len(config.teacher_seed) + config.teacher_seed.index(int(axes["teacher_seed"]))
    teacher = Network(group.teachers, at)
    student = Network(weights_of(group.students), number, group.students.midpoint)
    trained = [p for name, p in student.named_parameters() if config.target == "kl" or not name.startswith("head")]
    optimizer = torch.optim.Adam(trained, lr=config.lr)
    found = []
    for step in range(n_steps):
        optimizer.param_groups[0]["lr"] = config.learning_rate(step)
        input_BM = group.inputs(step)
        with torch.no_grad():
            wanted_BM = teacher(input_BM)
        state_BM = student(input_BM)
        if config.target == "mse":
            loss = F.mse_loss(state_BM, wanted_BM)
        else:
            student_temperature = axes["temperature"] if config.target == "kl_given_head" else 1.0
            with torch.no_grad():
                wanted_BV = F.log_softmax(teacher.head(wanted_BM) / axes["temperature"], -1)
            found_BV = F.log_softmax(student.head(state_BM) / student_temperature, -1)
            loss = F.kl_div(found_BV, wanted_BV, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def compare(config: ToyConfig, n_steps: int, repeats: int) -> tuple[list[float], list[float], float]:
    """Seconds batched and one by one, per repeat, and the largest relative difference of a loss."""
    times: dict[str, list[float]] = {"batched": [], "one by one": []}
    difference = 0.0
    for repeat in range(repeats):
        losses: dict[str, np.ndarray] = {}
        for way in ("batched", "one by one") if repeat % 2 else ("one by one", "batched"):
            group = Group(config)
            Group(config).take_step()  # warm
            started = time.perf_counter()
            if way == "batched":
                losses[way] = torch.stack([group.take_step() for _ in range(n_steps)]).numpy().T
            else:
                losses[way] = np.array([train_alone(group, k, n_steps) for k in range(config.n_students)])
            times[way].append(time.perf_counter() - started)
        gap = np.abs(losses["batched"] - losses["one by one"]) / np.abs(losses["one by one"])
        difference = max(difference, float(gap.max()))
    return times["batched"], times["one by one"], difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[6])
    parser.add_argument("--temperatures", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small group, in seconds")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    temperatures = tuple(np.logspace(-2, 0, chosen.temperatures).tolist())
    batch_size, teacher_layers = (128, 32) if chosen.quick else (1024, 128)
    failed = False
    for n_layers in chosen.layers:
        config = ToyConfig(
            n_layers=n_layers,
            rho=(1.0,),
            temperature=temperatures,
            batch_size=batch_size,
            teacher_layers=teacher_layers,
        )
        batched, alone, difference = compare(config, chosen.steps, chosen.repeats)
        ratios = [slow / fast for slow, fast in zip(alone, batched, strict=True)]
        work = config.n_students * chosen.steps
        print(
            f"{config.n_students} students of {n_layers} layers, {chosen.threads} threads: "
            f"{work / statistics.median(batched):.1f} student steps/s batched, "
            f"{work / statistics.median(alone):.1f} one by one, ratio {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f}, {max(ratios):.2f}]; losses differ by at most {difference:.1e}"
        )
        failed |= difference > TOLERANCE
    if failed:
        sys.exit(f"losses differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
