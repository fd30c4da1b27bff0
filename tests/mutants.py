"""`make mutants`: faults planted one at a time into a copy of the package, and whether the tests that should notice do.

Each fault is one place: a file, its text, the faulty text, and the tests that must fail. What survives is printed; with
more than ALLOWED survivors, or a text that is not found exactly once, the exit code is 1. Words in the command line
choose the faults whose file, or tests, contain one of them."""

import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ALLOWED = 5
LIMIT_SECONDS = 120.0
"""For the tests of one fault; what hangs is noticed."""
ROOT = Path(__file__).parent.parent
LOADED_ONCE = ("torch", "numpy", "pandas", "scipy.stats", "pytest", "hypothesis", "duckdb", "optuna", "pydantic")
"""Imported before the processes of the faults are forked, as imports take most of the time."""


class Fault(NamedTuple):
    file: str
    old: str
    new: str
    tests: str


OF: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("effects/fit.py", "effects/test_fit.py"): (
        ("variance_C[baseline] / (variance_C", "variance_C[setting] / (variance_C"),
        ("share_of_baseline(numbers[0], numbers[-1])", "share_of_baseline(numbers[-1], numbers[0])"),
    ),
    ("effects/curve.py", "effects/test_fit.py"): (
        ("ndtr((low_C - best_KGC)", "ndtr((best_KGC - low_C)"),
        ("OWN_ERROR**2 + 2 * (rho_G", "OWN_ERROR**2 + (rho_G"),
        ("np.minimum(omega2_GC, MAX_ERROR**2)", "np.maximum(omega2_GC, MAX_ERROR**2)"),
    ),
    ("effects/fit.py", "effects/test_frame.py"): (("= [*weights.values()]", "= [*weights.values()][::-1]"),),
    ("effects/frame.py", "effects/test_fit.py"): (
        ("variance_P = variance_P * weight_P**2", "variance_P = variance_P * np.abs(weight_P)"),
        ("(variance_P**2 / df_P)", "(variance_P / df_P)"),
        ("zip(SIDES, sides, strict=True)", "zip(SIDES, sides[::-1], strict=True)"),
    ),
    ("effects/frame.py", "effects/test_frame.py"): (("x = np.log2(np.array(values", "x = np.log(np.array(values"),),
    ("effects/verdict.py", "effects/test_fit.py"): (
        ("least = max(least, _chance(", "least = max(0.0, _chance("),
        ("loser.edge or loser.outside > 0.5", "loser.edge"),
    ),
    ("effects/verdict.py", "effects/test_frame.py"): (
        ("2 * min(low, 1 - low)", "min(low, 1 - low)"),
        ("estimate * sign > 0", "estimate * sign < 0"),
        ("shares = [ALPHA / 2, 1 - ALPHA / 2", "shares = [ALPHA, 1 - ALPHA"),
    ),
    ("effects/noise.py", "effects/test_frame.py"): (("df / 2 * both_HC", "df * both_HC"),),
    ("measure/bootstrap.py", "measure/test_bootstrap.py"): (
        ("math.sqrt(n_sequences / (n_sequences - 1))", "math.sqrt(1)"),
        ("finite(min(lo, value))", "finite(lo)"),
        ("len(known) == len(values)", "len(known) > 0"),
    ),
    ("measure/geometry.py", "measure/test_geometry.py"): (
        ("(ffn, before + attention)", "(ffn, before)"),
        ("round(6 * (n_layers - 2) / 22)", "round(6 * n_layers / 22)"),
        ("(at_end_B - 1).clamp(min=0)", "at_end_B"),
    ),
    ("measure/derivatives.py", "measure/test_derivatives.py"): (
        ("update_BTD = after_BTD - x_BTD", "update_BTD = after_BTD"),
        ("square_RL[:, -1:]", "square_RL[:, :1]"),
        ("torch.stack(products) - v_BTD", "torch.stack(products)"),
    ),
    ("measure/interventions.py", "measure/test_interventions.py"): (
        ("np.where(change_RLL == 0, 0.0,", "np.where(change_RLL < 0, 0.0,"),
        ("{a: b, b: a}", "{a: b}"),
        ("score.lo - 2 * max(", "score.lo - 0 * max("),
    ),
    ("measure/loss.py", "measure/test_loss.py"): (
        ("n_passed_R = np.logical_and.accumulate(passes_RD, axis=1).sum(1)", "n_passed_R = passes_RD.sum(1)"),
        ("return loss / math.log(2) / bytes_per_token", "return loss / bytes_per_token"),
        ("log_p_nLV - log_p_nLV[:, -1:]", "log_p_nLV[:, -1:] - log_p_nLV"),
    ),
    ("measure/measurements.py", "measure/test_measurements.py"): (
        ("np.arange(n_layers) / max(n_layers - 1, 1)", "np.arange(n_layers) / n_layers"),
        ("self.targets.numel() / self.n_scored", "1.0"),
    ),
    ("measure/sparsity.py", "measure/test_sparsity.py"): (
        ("_limits(taus, relative_taus, n_keys_R1)", "_limits(taus, relative_taus)"),
        ("future_RS, torch.inf", "future_RS, 0.0"),
    ),
    ("measure/usefulness.py", "measure/test_usefulness.py"): (
        ("(block.lo or 0.0) > 0", "True"),
        ("self.mean) @ self.weight + self.bias", "self.mean) @ self.weight"),
    ),
    ("measure/variance.py", "measure/test_variance.py"): (("** (1 / (n_layers - 1))", "** (1 / n_layers)"),),
    ("model/attention.py", "model/test_attention.py"): (
        ("times(v_BGTK, self.value_scalar)", "times(v_BGTK, self.first_value_scalar)"),
        ("distance_RS < (window or stop)", "distance_RS <= (window or stop)"),
        ("/ math.sqrt(q_BHTK.shape[-1])", "/ q_BHTK.shape[-1]"),
    ),
    ("model/feedforward.py", "model/test_decoder.py"): (
        ("gate_NC / gate_NC.sum(-1, keepdim=True)", "gate_NC"),
        ("balance = n_experts * ", "balance = "),
        ("logits_NE.logsumexp(-1, keepdim=True).pow(2)", "logits_NE.logsumexp(-1, keepdim=True)"),
    ),
    ("run/lease.py", "run/test_lease.py::test_the_heartbeat_that_finds_the_lease_taken_says_so_and_touches_no_more"): (
        ("self.lost = True", "self.lost = False"),
    ),
    ("run/lease.py", "run/test_lease.py"): (
        ("heartbeat.silent_seconds() > GRACE_SECONDS", "heartbeat.silent_seconds() > 0"),
        ("os.path.samestat(os.fstat(handle), os.stat(path))", "True"),
        ("< GRACE_SECONDS", "> GRACE_SECONDS"),
    ),
    (
        "run/train_and_measure.py",
        "run/test_execute.py::test_a_run_stops_at_its_next_step_if_its_lease_is_lost_or_a_stop_was_asked_for",
    ): (("self.lease is not None and self.lease.lost", "False"),),
    ("sweep/worker.py", "sweep/test_worker.py"): (
        ("scratch.add_failure(reason)", "pass"),
        ("elif len(configs) > 1:", "elif len(configs) > 9:"),
        ("2 * lease.GRACE_SECONDS", "lease.GRACE_SECONDS"),
        ("if code in (0, INTERRUPTED):", "if code in (0,):"),
    ),
    ("files.py", "test_files.py"): (
        ("        sync(temporary)\n        os.replace", "        os.replace"),
        ("if temporary.is_file():\n            temporary.unlink()", "pass"),
        ("allow_nan=False) + ", "allow_nan=True) + "),
        ("fcntl.flock(file, fcntl.LOCK_EX)", "pass"),
    ),
    ("store/checksums.py", "store/test_run_record.py"): (
        ("            sync(path)\n            files[name]", "            files[name]"),
        ("if checksum_of(content) != marker.files[name]:", "if False:"),
        ("if path.is_symlink():", "if False:"),
    ),
    ("store/fences.py", "store/test_fences.py::test_a_locked_connection_reads_nothing_else"): (
        ('connection.execute("SET enable_external_access = false")', "pass"),
        ('connection.execute("SET lock_configuration = true")', "pass"),
        ('"python_enable_replacements": False', '"python_enable_replacements": True'),
    ),
    ("outside.py", "store/test_fences.py"): (
        ("(min([most, *(limit for limit in limits if limit >= 0)]), limits[1])", "(limits[1], limits[1])"),
    ),
}
"""(file, tests) -> faults, each a text and the faulty one."""

FAULTS = [Fault(file, old, new, tests) for (file, tests), faults in OF.items() for old, new in faults]


def run_tests(root: Path, tests: list[str]) -> int:
    """pytest's exit code in this process, in a copy of the project; 1 where a test fails."""
    os.chdir(root)
    sys.path[:0] = [str(root), str(root / "tests")]
    os.environ["PYTHONPATH"] = str(root)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    return int(importlib.import_module("pytest").main(["-q", "-x", "-p", "no:cacheprovider", *tests]))


def exit_code(root: Path, tests: list[str], limit: float) -> int | None:
    """Of the tests in a forked process; None after the limit."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: os._exit(run_tests(root, [f"tests/{test}" for test in tests])))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def main(chosen: list[str]) -> int:
    faults = [fault for fault in FAULTS if not chosen or any(word in fault.file + fault.tests for word in chosen)]
    for fault in faults:
        if (n := (ROOT / "sparsedepth" / fault.file).read_text().count(fault.old)) != 1:
            print(f"sparsedepth/{fault.file} has {n} times, and must have once: {fault.old!r}")
            return 1
    for name in LOADED_ONCE:
        importlib.import_module(name)
    survivors, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in ("sparsedepth", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        if exit_code(root, [*dict.fromkeys(fault.tests for fault in faults)], 10 * LIMIT_SECONDS) != 0:
            print("the tests do not pass without a fault")
            return 1
        for fault in faults:
            path = root / "sparsedepth" / fault.file
            whole = path.read_text()
            path.write_text(whole.replace(fault.old, fault.new))
            code = exit_code(root, [fault.tests], LIMIT_SECONDS)
            path.write_text(whole)
            is_noticed = code in (None, 1)
            print(
                f"{'noticed ' if is_noticed else 'SURVIVED'} {fault.file}: {fault.old!r} -> {fault.new!r}", flush=True
            )
            survivors += [] if is_noticed else [fault]
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults noticed, in {time.monotonic() - began:.0f} s")
    return int(len(survivors) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
