"""Data that a configuration names: their options, and what a checkpoint remembers of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from metanudge.tasks import EncodedText, Episodes, Given, Labelled, Text
from metanudge.tasks.standardise import Standardisation
from metanudge.tasks.text import TextForm
from metanudge.training.config import GIVEN, flag
from metanudge.training.errors import UserError
from metanudge.training.spec_language import convert, options_of, show_options, split_options
from metanudge.training.specs import Shapes

_OWN_FLAGS = ("ways", "shots", "queries", "seed", "device", "dtype", *GIVEN)


@dataclass(frozen=True)
class DataShapes:
    """What a checkpoint remembers of the data, so that a model can be built without them and inputs
    be prepared as in training.
    """

    kind: Literal["classification", "regression"]
    num_outputs: int
    input_shape: tuple[int, ...]
    columns: tuple[str, ...] | None = None
    standardisation: Standardisation | None = None
    targets: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    target_scale: Standardisation | None = None
    form: TextForm | None = None

    @classmethod
    def of(cls, source: Shapes) -> DataShapes:
        """The shapes of a source, and how a table's columns were prepared."""
        shapes = source.kind, source.num_outputs, tuple(source.input_shape)
        if isinstance(source, (Given, DataShapes)):
            scales = source.columns, source.standardisation
            named = source.targets, source.labels
            form = source.form if isinstance(source, DataShapes) else None
            return cls(*shapes, *scales, *named, source.target_scale, form)
        if isinstance(source, Labelled):
            form = source.form if isinstance(source, EncodedText) else None
            return cls(*shapes, source.columns, source.standardisation, form=form)
        return cls(*shapes, form=source.form if isinstance(source, Text) else None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; what there is none of is left out."""
        values: dict[str, Any] = {
            "kind": self.kind,
            "num_outputs": self.num_outputs,
            "input_shape": list(self.input_shape),
        }
        if self.columns is not None:
            values["columns"] = list(self.columns)
        if self.standardisation is not None:
            values["mean"] = list(self.standardisation.mean)
            values["scale"] = list(self.standardisation.scale)
        if self.targets:
            values |= {"targets": list(self.targets), "labels": list(self.labels)}
        if self.target_scale is not None:
            values["target_mean"] = list(self.target_scale.mean)
            values["target_scale"] = list(self.target_scale.scale)
        if self.form is not None:
            values["form"] = self.form.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataShapes:
        """From `to_dict`'s result."""

        def scale(mean: str, scale: str) -> Standardisation | None:
            found = mean in values
            return Standardisation(tuple(values[mean]), tuple(values[scale])) if found else None

        return cls(
            values["kind"],
            values["num_outputs"],
            tuple(values["input_shape"]),
            tuple(values["columns"]) if "columns" in values else None,
            scale("mean", "scale"),
            tuple(values.get("targets", ())),
            tuple(values.get("labels", ())),
            scale("target_mean", "target_scale"),
            TextForm(**values["form"]) if "form" in values else None,
        )


@dataclass(frozen=True)
class Data:
    """Data that a configuration names.

    Attributes:
        name: as a finished configuration writes it.
        what: as messages call it.
        make: makes the source; its signature declares the data's options.
        has_classes: whether a task has ways.
        own_flags: its options that are flags of their own.
    """

    name: str
    what: str
    make: Callable[..., Episodes]
    has_classes: bool = True
    own_flags: tuple[str, ...] = ()

    @property
    def _flags(self) -> tuple[str, ...]:
        return _OWN_FLAGS + self.own_flags

    def build(self, **options: Any) -> Episodes:
        """The source, with its options, sizes and stream."""
        return self.make(**options)

    def options(self, text: str) -> dict[str, Any]:
        """What `--data-options` says, as the types that are declared."""
        raw = split_options(text, "--data-options")
        for key in raw:
            if key in self._flags:
                raise UserError(
                    f"--data-options: {key} has a flag of its own. Use {flag(key)} {raw[key]}."
                )
        return convert(raw, self.make, "--data-options", f"of {self.what}", but=self._flags)

    def all_options(self, text: str, source: Episodes) -> str:
        """Every option that has a value, as text, with what the source decided by itself: what a
        later version does by default changes no recorded run.
        """
        given = self.options(text)
        given |= self.decided(given, source)
        declared = options_of(self.make).items()
        values = {name: option.default for name, option in declared if name not in self._flags}
        values |= given
        return show_options({n: v for n, v in values.items() if v is not None or n in given})

    def decided(self, given: dict[str, Any], source: Episodes) -> dict[str, Any]:
        """The options that were left to the source, as it decided them."""
        return {}

    def as_remembered(self, given: dict[str, Any], shapes: DataShapes) -> dict[str, Any]:
        """The options with which examples are prepared as those of a checkpoint were."""
        return given
