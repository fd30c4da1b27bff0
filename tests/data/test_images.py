"""Images as sequences: patches worked out by hand, folders and data sets, and what is refused."""

import importlib

import numpy as np
import pytest
from PIL import Image

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.images import ImageSource
from sparsedepth.data.sequences import open_source, step_indices

SMALL = {
    "architecture": "vit", "image_size": 4, "patch_size": 2, "n_channels": 3, "vocab_size": 2, "batch_tokens": 20,
    "train_tokens": 20, "val_fraction": 0.3, "val_tokens": 20, "measure_tokens": 20, "fit_tokens": 70,
}  # fmt: skip


OF_IMAGES = ("image_size", "patch_size", "n_channels")


def picture(label: int, number: int) -> np.ndarray:
    """4 x 4 RGB: the value says channel, row and column; the corner, which image."""
    value = 50 * np.arange(3) + 10 * np.arange(4)[:, None, None] + np.arange(4)[:, None]
    value[0, 0] = (label, number, 7)
    return value.astype(np.uint8)


def folder(root, n: int = 12):
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for number in range(n):
            Image.fromarray(picture(label, number)).save(root / name / f"{number:02}.png")
    return root


def config(corpus, **fields) -> RunConfig:
    return build(RunConfig, {**SMALL, "corpus": f"images:{corpus}", **fields}, "test")


def opened(corpus, tmp_path, **fields) -> ImageSource:
    source = open_source(config(corpus, **fields), tmp_path / "out")
    assert isinstance(source, ImageSource)
    return source


def images_of(sequences) -> set[tuple[int, int, int]]:
    """(class, class in the corner pixel, number there) of each sequence."""
    return {
        (int(target), int(patches[1, 0]), int(patches[1, 4]))
        for patches, target in zip(sequences.inputs, sequences.targets[:, 0], strict=True)
    }


def test_a_folder_becomes_patches_by_channel_row_and_column(tmp_path):
    chosen = config(folder(tmp_path / "pets"))
    source = opened(tmp_path / "pets", tmp_path)
    batch = source.batch(chosen, 0)
    assert batch.inputs.shape == (4, 5, 12) and batch.inputs.dtype == np.uint8 and batch.n_scored == 4
    assert (batch.targets[:, 1:] == IGNORED).all() and not batch.inputs[:, 0].any()
    # Patch 2 is rows 0, 1 and columns 2, 3: of channel c the values 50 c + 10 row + column.
    assert batch.inputs[0, 2].tolist() == [2, 3, 12, 13, 52, 53, 62, 63, 102, 103, 112, 113]
    assert batch.inputs[0, 4].tolist() == [22, 23, 32, 33, 72, 73, 82, 83, 122, 123, 132, 133]
    held_out = source.held_out(5, 1000)
    everything = images_of(held_out)
    assert 0 < len(held_out) == len(everything) < 24
    trained = [images_of(source.batch(chosen, step)) for step in range(6)]
    assert not everything & set.union(*trained)
    assert all(target == label for target, label, _ in everything.union(*trained))
    assert len(everything) + source.corpus.manifest.train.documents == 24
    later = source.held_out(5, 1000, 11)  # the first two and the one that is begun
    assert np.array_equal(later.inputs, held_out.inputs[3:])


def test_a_step_is_a_function_of_seed_and_step_and_an_epoch_visits_each_once(tmp_path):
    folder(tmp_path / "pets")
    source, again = opened(tmp_path / "pets", tmp_path), opened(tmp_path / "pets", tmp_path)
    chosen = config(tmp_path / "pets")
    assert np.array_equal(source.batch(chosen, 5).inputs, again.batch(chosen, 5).inputs)
    other = config(tmp_path / "pets", seed=1)
    assert not np.array_equal(source.batch(chosen, 5).inputs, source.batch(other, 5).inputs)
    seen = np.concatenate([step_indices(10, 5, 0, step) for step in range(4)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and (seen[:10] != seen[10:]).any()


def test_sizes_and_channels_are_brought_to_those_of_the_model(tmp_path):
    """Twice as large and wide, of one colour: 8 x 16 becomes the same colour at 4 x 4, its grey by 601's weights."""
    for name, value in (("a", (200, 100, 0)), ("b", (0, 0, 0))):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number in range(4):
            image = Image.new("RGB", (16, 8), value)
            image.putpixel((0, number), (1, 2, 3))  # at the rim, which is cut: two images are otherwise one
            image.save(tmp_path / "in" / name / f"{number}.png")
    source = opened(tmp_path / "in", tmp_path, n_channels=1, batch_tokens=5, train_tokens=5, val_fraction=0.4)
    batch = source.held_out(5, 1000)
    seen = {(int(t[0]), int(v)) for t, x in zip(batch.targets, batch.inputs[:, 1:], strict=True) for v in x.flatten()}
    assert seen <= {(0, round(0.299 * 200 + 0.587 * 100)), (1, 0)}


def test_a_data_set_with_a_column_of_images_and_one_of_classes(tmp_path):
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as Images

    rows = [(label, number) for label in (0, 1) for number in range(12)]
    features = Features({"picture": Images(), "kind": ClassLabel(names=["cat", "dog"]), "note": Value("string")})
    pictures = [Image.fromarray(picture(*row)) for row in rows]
    columns = {"picture": pictures, "kind": [label for label, _ in rows], "note": ["" for _ in rows]}
    data = Dataset.from_dict(columns, features=features)
    (tmp_path / "pets").mkdir()
    data.to_parquet(tmp_path / "pets" / "train.parquet")
    source = opened(f"hub:{tmp_path / 'pets'}", tmp_path)
    folder(tmp_path / "files")
    assert source.data_hash == opened(tmp_path / "files", tmp_path).data_hash
    data.remove_columns("kind").to_parquet(tmp_path / "pets" / "train.parquet")
    with pytest.raises(ValueError, match="1 columns of images and 0 of classes among picture, note"):
        opened(f"hub:{tmp_path / 'pets'}", tmp_path / "again")


def test_the_digits_are_those_of_scikit_learn(tmp_path):
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    fields = {"vocab_size": None, "image_size": None, "patch_size": None, "n_channels": None, "fit_tokens": 1000}
    chosen = config("digits", **fields, **dict.fromkeys(("batch_tokens", "train_tokens"), 17 * 8),
                    **dict.fromkeys(("val_tokens", "measure_tokens"), 17 * 8))  # fmt: skip
    assert (chosen.image_size, chosen.patch_size, chosen.seq_len, chosen.vocab_size) == (8, 2, 17, 10)
    source = open_source(chosen, tmp_path)
    assert isinstance(source, ImageSource)
    batch = source.batch(chosen, 0)
    known = {image.astype(int).tobytes(): label for image, label in zip(digits.images, digits.target, strict=True)}
    for patches, target in zip(batch.inputs, batch.targets[:, 0], strict=True):
        image = patches[1:].reshape(4, 4, 2, 2).transpose(0, 2, 1, 3).reshape(8, 8)
        assert known[np.round(image / (255 / 16)).astype(int).tobytes()] == target


def test_what_cannot_be_read_is_one_clear_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there is no folder"):
        opened(tmp_path / "nowhere", tmp_path)
    (tmp_path / "flat").mkdir()
    Image.fromarray(picture(0, 0)).save(tmp_path / "flat" / "one.png")
    with pytest.raises(ValueError, match="a subfolder of its own"):
        opened(tmp_path / "flat", tmp_path)
    folder(tmp_path / "pets")
    with pytest.raises(ValueError, match="has 2 classes and the model vocab_size=3; set vocab_size=2"):
        opened(tmp_path / "pets", tmp_path, vocab_size=3)
    with pytest.raises(ValueError, match=r"reads 30 of 5 positions; use a smaller batch_tokens"):
        chosen = config(tmp_path / "pets", batch_tokens=150, train_tokens=150)
        opened(tmp_path / "pets", tmp_path).batch(chosen, 0)
    with pytest.raises(ValueError, match="no held-out image is left"):
        opened(tmp_path / "pets", tmp_path).held_out(5, 20, 10_000)
    (tmp_path / "pets" / "dog" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    with pytest.raises(ValueError, match=r"has changed since"):
        opened(tmp_path / "pets", tmp_path)
    with pytest.raises(ValueError, match=r"torn\.png cannot be read as an image"):
        opened(tmp_path / "pets", tmp_path / "again")
    monkeypatch.setitem(importlib.import_module("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"scikit-learn, which is not installed; pip install scikit-learn"):
        open_source(config("digits", vocab_size=10, n_channels=1), tmp_path)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"corpus": "stdlib"}, "architecture='vit' reads images, and corpus='stdlib' holds none"),
        ({"corpus": "task:k_hop"}, "reads images, and corpus='task:k_hop' holds none"),
        ({"architecture": None}, "holds images, and a decoder reads tokens; set architecture='vit'"),
        ({"patch_size": 3}, "patch_size=3 does not divide image_size=4; choose one of [1, 2, 4]"),
        ({"seq_len": 64}, "seq_len=64: an image of image_size=4 is a class token and 4 patches"),
        ({"corpus": "images:"}, "names no images"),
        ({"tokenizer": "bpe:300"}, "tokenizer='bpe:300' is about text"),
        ({"tie_embeddings": True}, "tie_embeddings=True with architecture='vit': a ViT embeds pixels"),
        ({"rope_theta": 5.0}, "the positions of a ViT are learned"),
        ({"eval_seq_len": 5}, "eval_seq_len=5 is about text"),
        ({"n_channels": 2}, "n_channels"),
    ],
    ids=str,
)
def test_pairs_that_do_not_fit_are_refused(fields, line):
    values = {**SMALL, "corpus": "images:x", **fields}
    if fields.get("architecture", "") is None:
        values = {name: value for name, value in values.items() if name not in OF_IMAGES} | {"architecture": "decoder"}
    with pytest.raises(ValueError) as error:
        build(RunConfig, values, "run.yaml")
    assert line in str(error.value) and "\n" not in str(error.value)
