"""`sparsedepth toy`: teacher-student networks that show how loss falls with depth in known regimes."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsedepth.cli import option
from sparsedepth.cli.start import with_cleanup

if TYPE_CHECKING:
    from sparsedepth.effects.intervals import Estimate
    from sparsedepth.toy.config import ToyConfig, ToyDefinition
    from sparsedepth.toy.exponents import Exponent


def toy(
    file: Annotated[Path, typer.Argument(help="toy definition (YAML), such as sweeps/toy.yaml")],
    out: Annotated[Path, typer.Option("-o", "--out", help="results folder; created if missing")],
    scale: option.Scale = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="override a field: --set n_steps=2000; repeatable")
    ] = None,
    device: option.Device = "auto",
) -> None:
    """Train teacher-student networks and fit how their loss falls with depth. Run the same command again to resume, or
    in parallel to share the work."""
    from sparsedepth.cli.input_file import toy_definition

    definition = toy_definition(file, scale, settings)
    groups = definition.groups()
    print(f"{definition.name}: {definition.question}")
    print(f"hypothesis: {definition.hypothesis}")
    print(f"{sum(group.n_students for group in groups)} students in {len(groups)} groups into {out}")
    busy = with_cleanup(out, lambda: _train(definition, groups, out, device))
    if busy:
        print(f"{busy} groups are being trained by another process; run this again later", file=sys.stderr)
        raise typer.Exit(1)
    print()
    print_exponents(out)
    folder = quote(str(out))
    print(f"\nnext:\n  sparsedepth plot {folder} -o {quote(f'{out}/figure.png')}")
    print(f'  sparsedepth query {folder} "select rho, n_layers, avg(test_loss) from toys group by all order by all"')


def _train(definition: "ToyDefinition", groups: Sequence["ToyConfig"], out: Path, device: str) -> int:
    """Train the incomplete groups; returns how many another process is training."""
    from sparsedepth.cli.run_progress import bar
    from sparsedepth.run.signals import stop_on_signals
    from sparsedepth.store.checksums import is_complete
    from sparsedepth.toy.record import toy_folder
    from sparsedepth.toy.training import is_busy, make_group
    from sparsedepth.train.loop import Interrupted
    from sparsedepth.train.runtime import find_device

    torch_device, stop = find_device(device), stop_on_signals(is_announced=True)
    facts = _manifest_facts(definition, torch_device)
    total = sum(group.flops for group in groups)
    done = busy = 0
    losses: list[float] = []
    with bar(definition.name) as report:

        def progress(name: str, group: "ToyConfig", step: int, loss: float | None) -> None:
            report(name, (done + group.flops * step / group.n_steps) / total, loss)
            losses.extend([] if loss is None else [loss])

        for number, group in enumerate(groups, start=1):
            name = f"[{number}/{len(groups)}] {group.target} {group.integrator}, {group.n_layers} layers"
            losses.clear()
            if not is_complete(toy_folder(out, group)):
                if is_busy(out, group):
                    busy += 1
                else:
                    try:
                        make_group(group, out, torch_device, facts, progress=partial(progress, name, group), stop=stop)
                    except Interrupted:
                        print("interrupted; run the same command again to resume", file=sys.stderr)
                        raise typer.Exit(130) from None
                    loss = f", loss {losses[-1]:.3g}" if losses else ""
                    print(f"{name}: {group.n_students} students complete{loss}", file=sys.stderr)
            done += group.flops
    return busy


def _manifest_facts(definition: "ToyDefinition", device: Any) -> dict[str, Any]:
    import torch

    from sparsedepth.run.manifest import code_version, package_versions

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "toy": definition.name,
        "question": definition.question,
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "code": code_version(),
        "packages": package_versions(),
    }


def print_exponents(results: Path) -> None:
    """Print a line per setting: its fitted exponent with interval, and the slope of a fit without a constant."""
    from sparsedepth.store.connection import open_store
    from sparsedepth.toy.exponents import MIN_DEPTHS, exponents, varied

    with open_store(results) as store:
        fitted = exponents(store.frame("select * from toys"))
    if not fitted:
        print(f"no exponent: the fit needs {MIN_DEPTHS} depths per setting")
        return
    print("test loss = c / n_layers^alpha + constant; [95% interval over teachers]; slope: alpha if constant = 0")
    names = varied(fitted)
    for exponent in fitted:
        print(f"  {exponent_line(exponent, names)}")


def exponent_line(exponent: "Exponent", names: Sequence[str]) -> str:
    """'rho=1, integrator=euler: alpha 2.1 [1.5, 2.7], slope ... (3 teachers, depths 3 to 12)'."""
    label = ", ".join(f"{name}={_value_text(exponent.setting[name])}" for name in names) or "all students"
    alpha = _interval(exponent.alpha) if exponent.alpha.mean is not None else "not identified"
    depths = f"depths {exponent.depths[0]} to {exponent.depths[-1]}"
    return f"{label}: alpha {alpha}, slope {_interval(exponent.slope)} ({len(exponent.teachers)} teachers, {depths})"


def _value_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _interval(estimate: "Estimate") -> str:
    interval = f"[{estimate.lo:.2f}, {estimate.hi:.2f}]" if estimate.lo is not None else "(no interval)"
    return f"{estimate.mean:.2f} {interval}"
