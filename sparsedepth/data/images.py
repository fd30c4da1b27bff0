"""Images with classes (`config.corpus` lists the corpora), stored once in token files, then read as sequences of
patches.

    document   257 + class, pixels 0..255 by channel, row, column, and 256 as the end, in a token file
    sequence   the class token, with ignored bytes of 0, then the patches, row by row
    target     the class, at the class token; no other position is scored

Images are resized to image_size by their shorter side (bicubic), cropped at the centre, and converted to grey or RGB.
There is no random augmentation: the batch of a step is a pure function of images, seed and step.

Shapes: N images, T positions, P values per patch, C channels, S = image_size, I = C S S.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparsedepth.config.corpus import DIGITS, corpus_name
from sparsedepth.config.plain_text import one_line
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.corpus import names_and_sizes, read_safely
from sparsedepth.data.pipeline import Corpus, CorpusSource, nothing_left, prepare, remedy
from sparsedepth.data.sequences import Counted, Sequences, Source, step_indices
from sparsedepth.data.tokenizer import Tokenizer
from sparsedepth.files import write_json

if TYPE_CHECKING:
    from PIL import Image

CLASSES_FILE = "classes.json"
_KINDS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
_END, _FIRST_CLASS = 256, 257
_FEWEST, _MOST = 2, 50_000

LabelledImage = tuple[int, "Callable[[], Image.Image]", str]
"""Class, a function that reads the image, and its place for messages."""


class ImageEncoder:
    """Used like a tokenizer: encodes an image of `ImagesKind` into the ids of its document."""

    eod = _END

    def __init__(self, classes: list[str]):
        self.classes, self.size = classes, _FIRST_CLASS + len(classes)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        parts = (text.encode("latin-1").partition(b":") for text in texts)
        return [np.append(_FIRST_CLASS + int(label), np.frombuffer(pixels, np.uint8)) for label, _, pixels in parts]

    def save(self, folder: Path) -> None:
        write_json(folder / CLASSES_FILE, self.classes)


def _pixels(image: "Image.Image", config: RunConfig) -> bytes:
    """image_size x image_size, by channel, row, column."""
    from PIL import Image, ImageOps

    assert config.image_size is not None
    image = ImageOps.exif_transpose(image).convert("L" if config.n_channels == 1 else "RGB")
    square = (config.image_size, config.image_size)
    if image.size != square:
        image = ImageOps.fit(image, square, method=Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.uint8).reshape(*square, -1).transpose(2, 0, 1).tobytes()


def _digits(corpus: str) -> tuple[list[str], Iterator[LabelledImage]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        fix = "which is not installed; pip install scikit-learn, or name a folder of images"
        raise ValueError(f"corpus={corpus!r} is part of scikit-learn, {fix}") from None
    from PIL import Image

    values_NI, label_N = load_digits(return_X_y=True)
    image_NSS = np.round(values_NI.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)  # from 0 to 16
    images = ((int(y), partial(Image.fromarray, x_SS), DIGITS) for x_SS, y in zip(image_NSS, label_N, strict=True))
    return [str(digit) for digit in range(10)], images


def _images_in(folder: Path) -> Iterator[Path]:
    visible = (path for path in folder.rglob("*") if not path.name.startswith("."))
    return (path for path in visible if path.suffix.lower() in _KINDS and path.is_file())


def class_folders(corpus: str) -> list[Path]:
    """The subfolders of a folder of images, one per class. Raises ValueError if there is none."""
    root = Path(corpus_name(corpus).place).expanduser()
    if not root.is_dir():
        fix = "correct the path, or use 'images:hub:NAME' for a data set of the hub"
        raise ValueError(f"corpus={corpus!r}: there is no folder {root.absolute()}; {fix}")
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    folders = [folder for folder in folders if any(_images_in(folder))]
    if not folders:
        fix = "put those of each class into a subfolder of its own"
        raise ValueError(f"corpus={corpus!r} has no subfolder with images ({', '.join(sorted(_KINDS))}); {fix}")
    return folders


def _folder_images(corpus: str) -> tuple[list[str], Iterator[LabelledImage]]:
    folders = class_folders(corpus)
    files = ((label, path) for label, folder in enumerate(folders) for path in sorted(_images_in(folder)))
    images = ((label, partial(_open_image, path), str(path)) for label, path in files)
    return [folder.name for folder in folders], images


def _open_image(path: Path) -> "Image.Image":
    from PIL import Image

    with Image.open(path) as image:
        image.load()
    return image


def _hub_images(corpus: str) -> tuple[list[str], Iterator[LabelledImage]]:
    """The train split of a hub data set with one column of images and one of classes."""
    from datasets import ClassLabel, Image, load_dataset

    name, _, subset = corpus_name(corpus).place.partition(":")
    try:
        data = load_dataset(name, subset or None, split="train", streaming=True)
        features = data.features or {}
    except Exception as error:  # the hub, its cache and the file formats each raise their own
        fix = "check the name, the configuration and the network, or name a folder: 'images:FOLDER'"
        raise ValueError(f"corpus={corpus!r} cannot be read ({one_line(error)}); {fix}") from None
    columns = [[key for key, kind in features.items() if isinstance(kind, of)] for of in (Image, ClassLabel)]
    if [len(keys) for keys in columns] != [1, 1]:
        found = f"{len(columns[0])} columns of images and {len(columns[1])} of classes"
        among = ", ".join(features) or "its columns"
        raise ValueError(f"corpus={corpus!r} has {found} among {among}; use a data set with one of each")
    (image,), (label,) = columns

    rows = enumerate(read_safely(data.select_columns([image, label]), f"corpus={corpus!r}", "check the network"))
    labelled = ((n, row) for n, row in rows if row[label] is not None and row[label] >= 0)  # -1 is unlabelled
    images = ((row[label], partial(row.get, image), f"corpus={corpus!r}, row {n},") for n, row in labelled)
    return list(features[label].names), images


def _read(corpus: str) -> tuple[list[str], Iterator[LabelledImage]]:
    """The class names of a corpus, in order of their indices, and its images."""
    return {"built in": _digits, "hub": _hub_images, "files": _folder_images}[corpus_name(corpus).origin](corpus)


class ImageSource(CorpusSource):
    eod: None = None

    def __init__(self, corpus: Corpus, config: RunConfig):
        self.corpus = corpus
        assert config.image_size is not None and config.patch_size is not None and config.n_channels is not None
        self._shape = (config.n_channels, config.image_size, config.patch_size)
        row = 2 + config.n_channels * config.image_size**2
        self._train, self._val = (ids.reshape(-1, row) for ids in (corpus.train, corpus.val))

    @property
    def classes(self) -> list[str]:
        """Class names. Raises ValueError if the data folder has lost them."""
        try:
            return json.loads((self.corpus.folder / CLASSES_FILE).read_bytes())
        except (OSError, ValueError):
            fix = remedy(self.corpus.folder)
            raise ValueError(f"{self.corpus.folder / CLASSES_FILE} is missing or damaged; {fix}") from None

    def counted(self, config: RunConfig) -> Counted:
        """Each class, whatever the image: chance is the loss of knowing how often each class occurs."""
        held_out = self.held_out(config.seq_len, config.val_tokens)
        labels_N1 = self._train[:, :1].astype(np.int64) - _FIRST_CLASS
        trained = Sequences(inputs=labels_N1, targets=labels_N1)
        return Counted(held_out, [trained], lambda part: np.zeros_like(part.targets), 1, ("chance_loss", None))

    def batch(self, config: RunConfig, step: int) -> Sequences:
        per_step = config.batch_tokens // config.seq_len
        if len(self._train) < per_step:
            step_of = f"a step of batch_tokens={config.batch_tokens:,} reads {per_step:,} of {config.seq_len} positions"
            told = f"corpus={config.corpus!r} has {len(self._train):,} training images, and {step_of}"
            raise ValueError(f"{told}; use a smaller batch_tokens")
        return self._sequences(self._train[step_indices(len(self._train), per_step, config.seed, step)])

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        first = -(-skip_tokens // seq_len)
        rows = self._val[first : first + n_tokens // seq_len]
        if not len(rows):
            images = f"{len(self._val):,} images have {seq_len} each"
            raise nothing_left("held-out image", n_tokens, skip_tokens, images)
        return self._sequences(rows)

    def _sequences(self, row_NI: np.ndarray) -> Sequences:
        channels, size, patch = self._shape
        per_side = size // patch
        pixels = row_NI[:, 1:-1].astype(np.uint8).reshape(-1, channels, per_side, patch, per_side, patch)
        patches_NTP = pixels.transpose(0, 2, 4, 1, 3, 5).reshape(len(row_NI), -1, channels * patch**2)
        targets_NT = np.full((len(row_NI), 1 + patches_NTP.shape[1]), IGNORED, dtype=np.int64)
        targets_NT[:, 0] = row_NI[:, 0].astype(np.int64) - _FIRST_CLASS
        return Sequences(inputs=np.pad(patches_NTP, ((0, 0), (1, 0), (0, 0))), targets=targets_NT)


class ImagesKind:
    """How images become files of ids: each is a text of 'CLASS:' and a character for each byte, as `split` needs."""

    own_fields = ("image_size", "n_channels")
    check = staticmethod(class_folders)

    def fingerprint(self, corpus: str) -> str | None:
        """12 hex digits that change with names and sizes of a folder of images; None without one."""
        root = Path(corpus_name(corpus).place).expanduser()
        return names_and_sizes(root, sorted(_images_in(root))) if root.is_dir() else None

    def texts(self, config: RunConfig) -> Iterator[str]:
        """Raises ValueError, naming the file or the fix, for a corpus that cannot be read."""
        for label, load, place in _read(config.corpus)[1]:
            try:
                pixels = _pixels(load(), config)
            except Exception as error:  # PIL raises OSError, ValueError, SyntaxError and more for broken files
                raise ValueError(f"{place} cannot be read as an image ({one_line(error)}); fix or remove it") from None
            yield f"{label}:{pixels.decode('latin-1')}"

    def tokenizer(self, config: RunConfig) -> ImageEncoder:
        """Raises ValueError, before the images are read, if there are too few classes or too many."""
        classes = _read(config.corpus)[0]
        if not _FEWEST <= len(classes) <= _MOST:
            raise ValueError(f"corpus={config.corpus!r} has {len(classes)} classes; expected {_FEWEST} to {_MOST:,}")
        _check_classes(config, len(classes))
        return ImageEncoder(classes)

    def encoder(self, tokenizer: ImageEncoder) -> ImageEncoder:
        return tokenizer

    def packages(self, config: RunConfig) -> list[str]:
        return ["pillow", "scikit-learn"] if corpus_name(config.corpus).origin == "built in" else ["pillow"]

    def check_fits(self, config: RunConfig, corpus: Corpus) -> None:
        _check_classes(config, corpus.manifest.tokenizer_size - _FIRST_CLASS)

    def open(self, config: RunConfig, root: Path, tokenizer: Tokenizer | None = None) -> Source:
        return ImageSource(prepare(config, root), config)


def _check_classes(config: RunConfig, n_classes: int) -> None:
    """Raises ValueError unless vocab_size is the number of classes."""
    if config.vocab_size != n_classes:
        told = f"corpus={config.corpus!r} has {n_classes} classes and the model vocab_size={config.vocab_size}"
        raise ValueError(f"{told}; set vocab_size={n_classes}")


KIND = ImagesKind()
