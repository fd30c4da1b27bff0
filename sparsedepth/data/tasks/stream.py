"""The sequences of a task, drawn from streams of random numbers: new ones at every step, and held-out ones.

    training   block b of step t, key (task, seed);   held out   block b, key (task, 2^63)   (`draws`)

The batch of a step is a pure function of (task, seed, step); held-out sequences are the same for all seeds. Several
steps are drawn at a time, BLOCK_TOKENS together, since NumPy's cost is per call.

Shapes: N sequences, T tokens of one sequence."""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import numpy as np

from sparsedepth.config.corpus import corpus_name
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import OF_PLUGINS, TASKS, TaskConfig
from sparsedepth.data.sequences import Counted, Sequences, Source, check_one_sequence
from sparsedepth.data.tasks.draws import Draws
from sparsedepth.data.tokenizer import Tokenizer
from sparsedepth.files import digest
from sparsedepth.quantities.quantity import Named

FORMAT = 1
"""Increased when the same configuration would give other sequences than before."""

HELD_OUT = 2**63
"""The held-out stream; training streams are seeds, below 2^31."""

CHANCE_POSITIONS = 2**18
"""Held-out positions from which chance is counted."""

BLOCK_TOKENS = 2**15
"""Tokens drawn at a time, at least one step."""

Draw = Callable[[TaskConfig, Draws, int, int, bool], Sequences]
"""(task, draws, n_sequences, seq_len, held_out) -> sequences"""

DRAW: dict[str, Draw] = {
    name: OF_PLUGINS[name].get("draw") if name in OF_PLUGINS else import_module(f"{__package__}.{name}").draw
    for name in TASKS
}


class TaskSource(Source):
    def __init__(self, config: RunConfig):
        self._name = corpus_name(config.corpus).place
        self.task = TaskConfig(**{field: getattr(config, field) for field in TaskConfig.model_fields})
        self._fields = self.task.model_dump(mode="json", exclude_none=True)
        self._block = lru_cache(maxsize=1)(self._draw_block)  # one block holds several steps

    @classmethod
    def open(cls, config: RunConfig, root: Path, tokenizer: Tokenizer | None = None) -> "TaskSource":
        """Needs no files."""
        return cls(config)

    @property
    def facts(self) -> Named:
        """What a run records: the task's fields."""
        return {"corpus": f"task:{self._name}", **self._fields, "format": FORMAT, "numpy": np.__version__}

    @property
    def data_hash(self) -> str:
        """12 hex digits: equal if and only if the task is."""
        return digest({"format": FORMAT, "task": self._name, **self._fields})

    def batch(self, config: RunConfig, step: int) -> Sequences:
        per_step = config.sequences_per_step
        steps = max(1, BLOCK_TOKENS // config.batch_tokens)
        block, place = divmod(step, steps)
        whole = self._block(config.seed, block, steps * per_step, config.seq_len)
        return whole[place * per_step : (place + 1) * per_step]

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        check_one_sequence(n_tokens, seq_len)
        first = -(-skip_tokens // seq_len)
        n = n_tokens // seq_len
        size = max(1, BLOCK_TOKENS // seq_len)
        blocks = range(first // size, (first + n - 1) // size + 1)
        parts = [vars(self._block(HELD_OUT, block, size, seq_len)) for block in blocks]
        whole = Sequences(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
        offset = first - blocks[0] * size
        return whole[offset : offset + n]

    def counted(self, config: RunConfig) -> Counted:
        """Each target at its position and difficulty: chance is the loss of knowing how often each answer occurs."""
        held_out = self.held_out(config.seq_len, config.val_tokens)
        assert held_out.difficulty is not None
        levels = int(held_out.difficulty.max()) + 1

        def position_and_difficulty(part: Sequences) -> np.ndarray:
            assert part.difficulty is not None
            return np.arange(part.inputs.shape[1]) * levels + np.minimum(part.difficulty, levels - 1)

        return Counted(
            held_out,
            # Not training sequences, of which text forms score other positions too.
            [self.held_out(config.seq_len, max(CHANCE_POSITIONS, config.seq_len), config.val_tokens)],
            position_and_difficulty,
            config.seq_len * levels,
            config.vocab_size,
            (None, "chance_loss"),
        )

    def _draw_block(self, stream: int, block: int, n_sequences: int, seq_len: int) -> Sequences:
        task = int(digest([self.data_hash, seq_len, n_sequences]), 16)
        return DRAW[self._name](self.task, Draws(task, stream, block), n_sequences, seq_len, stream == HELD_OUT)


KIND = TaskSource
