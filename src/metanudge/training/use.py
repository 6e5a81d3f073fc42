"""Using a trained learner: a few examples per class in, labels with probabilities out, and the adapted model to take away.

    from metanudge.training.use import adapt
    classifier = adapt("runs/omniglot", "support/")             # one sub-folder per class
    for found in classifier.predict("unknown/"):
        print(found.file, found.label, found.probability)
    classifier.export("model/")                                 # state_dict, class names, torch.export program

Models with BatchNorm are used inductively: after adaptation every BatchNorm layer keeps the statistics of the support set, so what
is said about a file does not depend on the other files.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metanudge.estimators import NonFiniteError
from metanudge.tasks.read_csv import read_csv
from metanudge.tasks.read_folder import _read_file, read_folder
from metanudge.training import runs
from metanudge.training.errors import UserError
from metanudge.training.evaluation import with_support_statistics
from metanudge.training.runs import Run
from metanudge.training.specs import convert, split_options
from metanudge.version import __version__

FILES_AT_ONCE = 256
LARGEST_EXPORT_ERROR = 1e-5
WEIGHTS, PROGRAM, DESCRIPTION = "model.safetensors", "program.pt2", "model.json"
_TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class Preprocessing:
    """How a file becomes an input of the model; the same as in training.

    Attributes:
        input_shape: of one example, channels first.
        dtype: of the inputs.
        grey: images get one channel instead of three.
        image_size: (height, width) that images are resized to with a Lanczos filter; None for inputs that are no images.
        invert: dark becomes 1 and light 0 (Omniglot: ink 1, paper 0); otherwise light is 1.
        label: the label's column in a table.
        columns: the columns with numbers, in order; None for all but the label, in the file's order.
        delimiter: what separates the cells of a table.
    """

    input_shape: tuple[int, ...]
    dtype: str = "float32"
    grey: bool = True
    image_size: tuple[int, int] | None = None
    invert: bool = False
    label: str = "label"
    columns: tuple[str, ...] | None = None
    delimiter: str = ","

    @classmethod
    def of(cls, run: Run) -> Preprocessing:
        """What a run's training data went through."""
        shape = run.shapes.input_shape
        image = len(shape) == 3 and shape[0] in (1, 3)
        table = _table_options(run) if Path(run.config.data).suffix.lower() in _TABLES else {}
        return cls(
            input_shape=shape,
            dtype=run.config.dtype,
            grey=not image or shape[0] == 1,
            image_size=(shape[1], shape[2]) if image else None,
            invert=run.config.data == "omniglot",
            **table,
        )

    def tensor(self, raw: Tensor) -> Tensor:
        """Raw examples `(n, ...)` as model inputs: uint8 to [0, 1], floats to `dtype`, other integers (token numbers) as they are."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if raw.dtype == torch.uint8:
            return (255 - raw if self.invert else raw).to(dtype) / 255
        return raw.to(dtype) if raw.is_floating_point() or raw.dtype == torch.bool else raw.long()

    def check(self, raw: Tensor, where: object) -> None:
        """Refuse examples of another shape than the model's, and numbers that are not finite."""
        if tuple(raw.shape[1:]) != self.input_shape:
            kind = f"{self.input_shape[0]} numbers" if len(self.input_shape) == 1 else f"shape {self.input_shape}"
            raise UserError(
                f"{where} has shape {tuple(raw.shape[1:])}, but the run was trained on examples of {kind}. "
                "Give data of the same kind, or use a run that was trained on this kind."
            )
        if raw.is_floating_point() and not bool(torch.isfinite(raw).all()):
            raise UserError(f"{where} holds NaN or infinity. Correct it or leave it out.")


@dataclass(frozen=True)
class Prediction:
    """What the model says about one file.

    Attributes:
        file: its path relative to the folder given, or FILE:ROW for the rows of a table.
        label: the most probable class.
        probability: of that class.
        probabilities: of every class, in the order of `Classifier.classes`.
        truth: the class that the file's sub-folder or the table's label column names, where there is one.
    """

    file: str
    label: str
    probability: float
    probabilities: tuple[float, ...]
    truth: str | None = None


@dataclass(frozen=True)
class Classifier:
    """A model adapted to the classes of a support set; made by `adapt`.

    Attributes:
        model: an ordinary module in evaluation mode, inputs in, logits out.
        classes: class names in the order of the outputs.
        preprocessing: how files become inputs.
        support: the inputs it was adapted on.
        counts: support examples per class.
    """

    model: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    support: Tensor
    counts: tuple[int, ...]

    @property
    def looks_inverted(self) -> bool:
        """Whether an Omniglot learner was shown light ink on dark paper."""
        return self.preprocessing.invert and float(self.support.mean()) > 0.5

    def logits(self, inputs: Tensor) -> Tensor:
        """`(n, classes)` for preprocessed inputs `(n, *input_shape)`."""
        with torch.no_grad():
            logits: Tensor = self.model(inputs.to(self.support.device))
        return logits

    def predict(self, path: str | os.PathLike[str]) -> Iterator[Prediction]:
        """Predictions for a folder of files (flat or nested), a single file or a table, in the order of the sorted names.

        Files are read a few at a time, as the predictions are asked for. Hidden files are passed over.
        """
        with _explained():
            examples = self._examples(Path(path))
            while part := list(islice(examples, FILES_AT_ONCE)):
                raw = torch.stack([example for _, _, example in part])
                chances = self.logits(self.preprocessing.tensor(raw)).double().softmax(1).cpu()
                for (file, truth, _), row in zip(part, chances, strict=True):
                    best = int(row.argmax())
                    yield Prediction(file, self.classes[best], float(row[best]), tuple(row.tolist()), truth)

    def export(self, folder: str | os.PathLike[str], *, program: bool = True, overwrite: bool = False) -> Path:
        """Write the adapted model to a new folder; what was written is read again and checked before it gets its name.

        - `model.safetensors`: the state_dict.
        - `model.json`: class names, preprocessing, and what made it.
        - `program.pt2`: a `torch.export` program (any batch size), which runs without metanudge and without the model's code. Its
          logits equal the model's to 1e-5.

        Args:
            folder: where to; must not exist.
            program: write the program; turn this off for models that `torch.export` cannot trace.
            overwrite: replace an exported model that is there already.
        """
        with new_folder(Path(folder), overwrite=overwrite, mark=DESCRIPTION) as temporary:
            self._save_weights(temporary / WEIGHTS)
            if program:
                self._save_program(temporary / PROGRAM)
            description = {
                "format": "metanudge adapted model 1",
                "metanudge": __version__,
                "torch": torch.__version__,
                "classes": list(self.classes),
                "support_examples": dict(zip(self.classes, self.counts, strict=True)),
                "batch_norm": "statistics of the support set" if _has_batch_norm(self.model) else None,
                "outputs": "logits, one per class in this order; softmax gives probabilities",
                "preprocessing": asdict(self.preprocessing),
            }
            (temporary / DESCRIPTION).write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return Path(folder)

    def _save_weights(self, file: Path) -> None:
        from safetensors.torch import load_file, save_file

        # Tensors that share memory cannot be stored as they are.
        saved = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(saved, file)
        os.chmod(file, 0o666 & ~_umask())  # safetensors makes files that only their owner can read
        again = load_file(file)
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[name], saved[name]) for name in saved)

    def _save_program(self, file: Path) -> None:
        example = self.support[:2] if len(self.support) > 1 else self.support.repeat(2, *[1] * (self.support.ndim - 1))
        try:
            exported = torch.export.export(self.model, (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
            torch.export.save(exported, file)
            again = torch.export.load(file).module()
        except Exception as error:  # tracing runs the user's own code; it can raise anything
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"torch.export cannot trace this model ({type(error).__name__}: {reason}). "
                "Export without the program: --no-program, or export(..., program=False)."
            ) from error
        for inputs in (self.support, self.support[:1]):
            with torch.no_grad():
                difference = float((again(inputs) - self.logits(inputs)).abs().max())
            if not difference <= LARGEST_EXPORT_ERROR:
                raise UserError(
                    f"The torch.export program gives other logits than the model (by {difference:.2g}), so it was not kept. "
                    "Export without it: --no-program, or export(..., program=False)."
                )

    def _examples(self, path: Path) -> Iterator[tuple[str, str | None, Tensor]]:
        """Name, true class if known, and raw tensor of every example."""
        if path.suffix.lower() in _TABLES and path.is_file():
            yield from self._rows(path)
            return
        if not path.exists():
            raise UserError(f"--predict {path} does not exist. Give a folder of files, one file, or a .csv table.")
        files = [path] if path.is_file() else _visible_files(path)
        if not files:
            raise UserError(f"--predict {path} holds no files. Put the files to be labelled into it.")
        root = path.parent if path.is_file() else path
        for file in files:
            raw = _read_file(file, size=self.preprocessing.image_size, grey=self.preprocessing.grey)
            self.preprocessing.check(raw[None], file)
            truth = file.parent.name if file.parent != root and file.parent.name in self.classes else None
            yield file.relative_to(root).as_posix(), truth, raw

    def _rows(self, path: Path) -> Iterator[tuple[str, str | None, Tensor]]:
        how = self.preprocessing
        values, labels = _read_table(path, how, with_label=how.label in _header(path, how.delimiter))
        self.preprocessing.check(values, path)
        for number, (row, label) in enumerate(zip(values, labels, strict=True), start=1):
            yield f"{path.name}:{number}", label if label in self.classes else None, row


def adapt(run: Run | str | os.PathLike[str], support: str | os.PathLike[str], *, steps: int | None = None) -> Classifier:
    """Adapt a run's learner to new classes.

    Args:
        run: a run, or its folder.
        support: a folder with one sub-folder per class that holds a few examples, or a table (.csv) with a label column.
        steps: adaptation steps, if not as many as in training.
    """
    if not isinstance(run, Run):
        run = runs.load(run)
    if run.shapes.kind != "classification":
        raise UserError(f"{run.folder} was trained on {run.config.data}, a regression: it has no classes. Use a run on classified data.")
    how = Preprocessing.of(run)
    with _explained():
        raw, labels, how = _read_support(Path(support), how)
    classes = tuple(sorted(set(labels)))
    if len(classes) != run.shapes.num_outputs:
        raise UserError(
            f"--support {support} has {len(classes)} classes ({_some(classes)}), but {run.folder} was trained for "
            f"{run.shapes.num_outputs} ways. Give exactly {run.shapes.num_outputs} classes, or train a run with --ways {len(classes)}."
        )
    device = next(run.learner.parameters()).device
    inputs = how.tensor(raw).to(device)
    targets = torch.tensor([classes.index(label) for label in labels], device=device)
    try:
        with run.precision():
            adapted = run.learner.adapt((inputs, targets), steps=steps)
            model = with_support_statistics(adapted, inputs)
    except NonFiniteError as error:
        raise UserError(f"--support {support}: {error}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Classifier(model, classes, how, inputs, tuple(labels.count(name) for name in classes))


def write_predictions(file: IO[str], classes: Sequence[str], predictions: Iterable[Prediction]) -> list[Prediction]:
    """Write predictions as CSV: file, label, probability, and one column of probabilities per class. Returns what was written."""
    fixed = ("file", "label", "probability")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*fixed, *(f"class {name}" if name in fixed else name for name in classes)])
    written = []
    for found in predictions:
        writer.writerow([found.file, found.label, f"{found.probability:.6f}", *(f"{p:.6f}" for p in found.probabilities)])
        written.append(found)
    return written


@contextmanager
def new_file(path: Path, *, overwrite: bool, flag: str) -> Iterator[IO[str]]:
    """A text file that gets its name when the block ends well, and leaves no trace when it does not."""
    check_new_file(path, overwrite=overwrite, flag=flag)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written ({error.strerror}). Choose another place.") from error
    try:
        # A file name that is not valid Unicode is written back byte by byte as it is.
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written ({error.strerror}). Free some space or choose another place.") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def check_new_file(path: Path, *, overwrite: bool, flag: str) -> None:
    """Raise `UserError` where `new_file` would, as far as can be told beforehand."""
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder. Name a file, such as {path / 'predictions.csv'}.")
    if path.exists() and not overwrite:
        raise UserError(f"{flag} {path} exists already. Choose another name, or replace it with --overwrite.")
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no folder {path.parent}. Create it first, or choose another place.")


@contextmanager
def new_folder(path: Path, *, overwrite: bool, mark: str) -> Iterator[Path]:
    """A folder that gets its name when the block ends well; one that is replaced must hold `mark`, the sign that we made it."""
    check_new_folder(path, overwrite=overwrite, mark=mark)
    try:
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    except OSError as error:
        raise UserError(f"--export {path} cannot be written ({error.strerror}). Choose another place.") from error
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"--export {path} cannot be written ({error.strerror}). Free some space or choose another place.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_new_folder(path: Path, *, overwrite: bool, mark: str = DESCRIPTION) -> None:
    """Raise `UserError` where `new_folder` would."""
    if path.exists() and not (overwrite and (path / mark).is_file()):
        how = "or replace it with --overwrite" if (path / mark).is_file() else "it is not an exported model, so it is not replaced"
        raise UserError(f"--export {path} exists already. Choose another name; {how}.")
    if not path.parent.is_dir():
        raise UserError(f"--export {path}: there is no folder {path.parent}. Create it first, or choose another place.")


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _read_support(path: Path, how: Preprocessing) -> tuple[Tensor, list[str], Preprocessing]:
    """Raw examples, their labels, and the preprocessing with the table's columns filled in."""
    if path.suffix.lower() in _TABLES and path.is_file():
        columns = tuple(c for c in _header(path, how.delimiter) if c != how.label) if how.columns is None else how.columns
        values, names = _read_table(path, how, with_label=True)
        how.check(values, path)
        return values, names, Preprocessing(**(asdict(how) | {"columns": columns}))
    if not path.is_dir():
        raise UserError(f"--support {path} is neither a folder nor a .csv table. Give a folder with one sub-folder per class.")
    raw, names = read_folder(path, image_size=how.image_size, grey=how.grey)
    how.check(raw, f"--support {path}")
    return raw, names, how


def _read_table(path: Path, how: Preprocessing, *, with_label: bool) -> tuple[Tensor, list[str]]:
    header = _header(path, how.delimiter)
    if with_label:
        values, labels = read_csv(path, label=how.label, features=how.columns, delimiter=how.delimiter)
        return torch.from_numpy(values), labels
    columns = [c for c in header if c != how.label] if how.columns is None else list(how.columns)
    # The reader wants a label column; any column will do, since its cells are not looked at as labels.
    values, _ = read_csv(path, label=columns[0] if columns[0] in header else how.label, features=columns, delimiter=how.delimiter)
    return torch.from_numpy(values), [""] * len(values)


def _header(path: Path, delimiter: str) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return next(csv.reader(lines, delimiter=delimiter), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a readable CSV file in UTF-8 ({error}). Save it as one.") from error


def _table_options(run: Run) -> dict[str, Any]:
    """Label, columns and delimiter of the table that a run was trained on."""

    def table(*, label: str = "label", features: tuple[str, ...] | None = None, delimiter: str = ",") -> None:
        """Declares the options; never called."""

    raw = split_options(run.config.data_options, "--data-options")
    wanted = {key: value for key, value in raw.items() if key in ("label", "features", "delimiter")}
    options = {"label": "label", "delimiter": ",", **convert(wanted, table, "--data-options", "of a .csv file")}
    features = options.pop("features", None)
    if features is None and Path(run.config.data).is_file():  # the order of the columns matters to the model
        features = [c for c in _header(Path(run.config.data), options["delimiter"]) if c != options["label"]]
    return {**options, "columns": None if features is None else tuple(features)}


def _visible_files(folder: Path) -> list[Path]:
    found = (file for file in folder.rglob("*") if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    return sorted(file for file in found if file.is_file())


def _some(names: Sequence[str]) -> str:
    return ", ".join(islice(names, 8)) + (", …" if len(names) > 8 else "")


@contextmanager
def _explained() -> Iterator[None]:
    """What the readers refuse becomes a `UserError`; their messages name the file and the fix already."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        told = str(error) if error.errno is None else f"{error.filename} cannot be read ({error.strerror})."
        raise UserError(told) from error
