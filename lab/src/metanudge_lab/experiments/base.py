"""What an experiment is: one file that measures one figure or table of the paper, draws it, and
judges the paper's claim from the rows.

To add an experiment `some-name` (its place in the paper's order is already in
`metanudge_lab.experiments.NAMES`), write `experiments/some_name.py` like this, and a line in
`lab/tests/tiny_experiments.py` with settings that take a second or two:

    @dataclass(frozen=True)
    class Config(Settings):  # as it stands: on a GPU, or a long while on a CPU
        steps: tuple[int, ...] = (1, 5, 20)  # JSON values and tuples of them: saved beside the rows
        seeds: int = 5

        @classmethod
        def quick(cls) -> Config:  # on two CPU cores, a minute or so
            return cls(seeds=2)

    def cells(config: Config) -> list[Cell]:  # independent units of work: flat dicts of scalars
        return [{"method": m, "seed": s} for m in METHODS for s in range(config.seeds)]

    def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
        ...  # seeded by the cell alone: any order, any machine
        return [{"steps": k, "error": e}, ...]  # the cell's own keys are added; NaN becomes null

    def draw(result: Result[Config]) -> list[Drawing]:
        figure, axes = style.figure()  # `metanudge_lab.style`: the same look everywhere
        for method in result.distinct("method"):
            errors = result.spreads("error", "steps", result.config.steps, method=method)
            style.band(axes, errors, **style.line(method))
        return [Drawing(figure, alt="what the picture shows, in words and numbers")]

    def table(result: Result[Config]) -> ResultTable:
        return ResultTable(("method", "error at 20 steps"), [("MAML", 0.01), ...])

    def judge(result: Result[Config]) -> Verdict:   # from the rows; numbers are never typed
        return Verdict.of([Statement(error < other, "it is lower", "it is not")], "…")

    EXPERIMENT = Experiment(
        name="some-name", title="…", where="Figure 1, above", claim="…",
        config=Config, cells=cells, measure=measure, draw=draw, table=table, judge=judge,
    )

`measure` sees torch and numpy only (import matplotlib inside `draw`; never rich, tyro, jinja2,
safetensors): it runs on bare machines as `python -m metanudge_lab.experiments some-name`. `draw`
and `table` must work for any part of the cells, since the page shows unfinished results too;
`judge` is called once every cell of the config is there, or `enough` of them. A method that
diverges is a row with NaN, not an exception. What `fewshot.Trial` trains goes on after a crash.
"""

from __future__ import annotations

import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeVar

from metanudge.training.files import without_nan
from metanudge_lab.experiments.spread import Mean, Spread, sentence, short

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

Scalar = str | int | float | bool | None
Cell = dict[str, Scalar]
Row = dict[str, Any]  # JSON scalars and lists of them
Mode = Literal["quick", "full"]
MODES: tuple[Mode, ...] = ("full", "quick")
Status = Literal["reproduced", "partly", "not"]
STATUSES: tuple[Status, ...] = ("reproduced", "partly", "not")


class Settings(ABC):
    """What configurations derive from: frozen dataclasses of JSON values or tuples of them."""

    @classmethod
    @abstractmethod
    def quick(cls) -> Self:
        """A minute or so on two CPU cores."""

    @classmethod
    def full(cls) -> Self:
        """What the verdict should rest on."""
        return cls()


C = TypeVar("C")
X = TypeVar("X")


class Statement(NamedTuple):
    """One part of a claim, judged by itself.

    Attributes:
        holds: whether it does; None where it was not tested.
        yes, no: words for that and for the contrary; of what was not tested, `yes` says what.
        name: by which the list of the paper's claims finds it; several may share one.
    """

    holds: bool | None
    yes: str
    no: str = ""
    name: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether the paper's claim held.

    Attributes:
        status: "reproduced", "partly" or "not".
        measured: one sentence with the numbers we found.
        reason: why the status is what it is; where the claim failed, if it did.
        parts: the statements it is made of, where the claim has several.
    """

    status: Status
    measured: str
    reason: str
    parts: tuple[Statement, ...] = ()

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status

    @classmethod
    def of(cls, statements: Sequence[Statement], measured: str, more: str = "") -> Verdict:
        """From statements; `more` explains. With a part that was not tested, nothing is more than
        partly reproduced.

        Example:
            >>> parts = [Statement(True, "a falls"), Statement(False, "b falls", "b rises")]
            >>> Verdict.of(parts, "").reason
            'A falls. But b rises.'
            >>> found = Verdict.of([*parts[:1], Statement(None, "what c does")], "")
            >>> found.status, found.reason
            ('partly', 'A falls. Not tested: what c does.')
        """
        right = [one.yes for one in statements if one.holds]
        wrong = [one.no for one in statements if one.holds is False]
        texts = [sentence(*right)] if right else []
        if wrong:
            texts.append(sentence(*(["but " + wrong[0], *wrong[1:]] if right else wrong)))
        texts.append(more)
        untested = [one.yes for one in statements if one.holds is None]
        if untested:
            texts.append(f"Not tested: {'; '.join(untested)}.")
        return cls(state_of(statements), measured, " ".join(filter(None, texts)), tuple(statements))


def state_of(statements: Iterable[Statement]) -> Status:
    """Of some parts of a claim together; at least one of them was tested."""
    found = {one.holds for one in statements}
    return "reproduced" if found == {True} else "partly" if True in found else "not"


@dataclass(frozen=True)
class Shown:
    """A value of a table that is sorted by `value` and shown as `text`, such as `Shown(0.951, "95.1
    ± 0.3 %")`.
    """

    value: float
    text: str

    @classmethod
    def of(cls, found: Mean, digits: int) -> Shown:
        """A mean with its interval."""
        return cls(found.mean, found.text(digits))

    @classmethod
    def short(cls, value: float) -> Shown:
        """An error or a loss in two significant digits."""
        return cls(value, short(value))

    @classmethod
    def number(cls, value: float, spec: str, after: str = "") -> Shown:
        """A number in a format, with a word after it; a dash for NaN.

        Example:
            >>> Shown.number(0.951, ".2f", " (1)").text, Shown.number(math.nan, ".2f").text
            ('0.95 (1)', '–')
        """
        return cls(value, "–" if math.isnan(value) else f"{value:{spec}}{after}")


@dataclass(frozen=True)
class ResultTable:
    """Rows for the page; numbers are shown with three significant digits unless wrapped in
    `Shown`. `details` is a second table, folded away.
    """

    header: tuple[str, ...]
    rows: Sequence[tuple[str | int | float | Shown | None, ...]]
    details: ResultTable | None = None

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.header) for row in self.rows), (
            "every row has one value per column"
        )


@dataclass(frozen=True)
class Drawing:
    """A picture: a matplotlib figure, what it shows in words, and, where there are several, what
    tells its file apart.
    """

    figure: Figure
    alt: str
    suffix: str = ""


@dataclass(frozen=True)
class FinishedCell:
    """One finished cell: its rows, how long they took, and which of the result's machines did
    it.
    """

    cell: Cell
    rows: list[Row]
    seconds: float
    machine: int


@dataclass(frozen=True)
class Result(Generic[C]):
    """What has been measured of an experiment.

    Attributes:
        name: of the experiment.
        mode: "quick" or "full".
        config: what was asked for.
        measured: the finished cells.
        machines: provenance of each machine and commit that took part (see
            `metanudge_lab.provenance`).
        missing: cells of the config that are not finished.
    """

    name: str
    mode: Mode
    config: C
    measured: list[FinishedCell] = field(default_factory=list)
    machines: list[dict[str, Any]] = field(default_factory=list)
    missing: list[Cell] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every cell of the config is there."""
        return not self.missing

    @property
    def seconds(self) -> float:
        """That all cells took together."""
        return sum(measured.seconds for measured in self.measured)

    def rows(self, **where: Any) -> list[Row]:
        """The rows, each with the keys of its cell, that have these values.

        Example:
            >>> result = Result("x", "quick", None,
            ...     [FinishedCell({"seed": 3}, [{"k": 1, "e": 0.5}, {"k": 2, "e": None}], 0.1, 0)])
            >>> result.rows(k=1)
            [{'seed': 3, 'k': 1, 'e': 0.5}]
            >>> result.values("e")
            [0.5, nan]
            >>> result.distinct("k")
            [1, 2]
        """
        few = min(
            (self._with(key).get(value, []) for key, value in where.items()),
            key=len,
            default=self._rows,
        )
        return [row for row in few if all(row.get(key) == value for key, value in where.items())]

    @functools.cached_property
    def _rows(self) -> list[Row]:
        return [{**measured.cell, **row} for measured in self.measured for row in measured.rows]

    @functools.cached_property
    def _indices(self) -> dict[str, dict[Any, list[Row]]]:
        return {}

    def _with(self, key: str) -> dict[Any, list[Row]]:
        """The rows by their value of a key, since a figure asks for a few of them thousands of
        times; lists stand with None.
        """
        if key not in self._indices:
            index = self._indices[key] = {}
            for row in self._rows:
                value = row.get(key)
                index.setdefault(None if isinstance(value, list) else value, []).append(row)
        return self._indices[key]

    def values(self, key: str, **where: Any) -> list[float]:
        """One number per row; NaN where it was not finite."""
        return numbers(self.rows(**where), key)

    def spread(self, key: str, **where: Any) -> Spread:
        """Of the values of at least one row."""
        return Spread.of(self.values(key, **where))

    def along(self, key: str, axis: str, at: Iterable[X], **where: Any) -> dict[X, list[float]]:
        """The values at each place of an axis that has any."""
        found = {place: self.values(key, **{axis: place}, **where) for place in at}
        return {place: values for place, values in found.items() if values}

    def spreads(self, key: str, axis: str, at: Iterable[X], **where: Any) -> dict[X, Spread]:
        """A curve: their spread at each place."""
        return {
            place: Spread.of(values) for place, values in self.along(key, axis, at, **where).items()
        }

    def distinct(self, key: str) -> list[Any]:
        """The values of a key in the order in which they first appear."""
        return list(dict.fromkeys(row[key] for row in self._rows if key in row))


@dataclass(frozen=True)
class Experiment(Generic[C]):
    """One figure or table of the paper; see the top of this file for how to write one.

    Attributes:
        name: on the command line; the module's name with hyphens.
        title: heading on the page.
        where: in the paper, such as "Figure 1, above".
        claim: what the paper says, in a sentence or two.
        config: the frozen dataclass with `quick()` and `full()`.
        cells: the units of work of a config.
        measure: rows of one cell.
        draw: pictures.
        table: numbers.
        judge: verdict on the claim.
        notes: what we do differently from the paper, or had to choose because it does not say.
        compare: those statements of the verdict that set methods against one another. They hold for
            the labels' sake: with the values of `labels` dealt anew within each `unit`, they must
            not (a test does that).
        labels: the keys of cells that name methods.
        unit: the keys of cells whose values make up what was measured independently.
        enough: whether what there is suffices for a verdict, which then says what was not tested;
            by default only all cells do.
        remember: told before cells are measured what there is of the others, so that nothing is
            found out twice.
    """

    name: str
    title: str
    where: str
    claim: str
    config: type[C]
    cells: Callable[[C], list[Cell]]
    measure: Callable[[Cell, C, torch.device], list[Row]]
    draw: Callable[[Result[C]], list[Drawing]]
    table: Callable[[Result[C]], ResultTable]
    judge: Callable[[Result[C]], Verdict]
    notes: str = ""
    compare: Callable[[Result[C]], Sequence[Statement]] = lambda result: ()
    labels: tuple[str, ...] = ("method",)
    unit: tuple[str, ...] = ("seed",)
    enough: Callable[[Result[C]], bool] = lambda result: result.complete
    remember: Callable[[Result[C]], None] = lambda result: None

    def configuration(self, mode: Mode) -> C:
        """The config of a mode."""
        return getattr(self.config, mode)()


def numbers(rows: Iterable[Row], key: str) -> list[float]:
    """A number of every row; NaN where it was not finite."""
    return [math.nan if row[key] is None else float(row[key]) for row in rows]


def label(cell: Cell) -> str:
    """A cell as text: what progress shows and `--cells` matches.

    Example:
        >>> label({"method": "MAML", "seed": 0})
        'method=MAML seed=0'
    """
    return " ".join(f"{key}={value}" for key, value in cell.items())


def json_safe(value: Any) -> Any:
    """The value with NaN and infinities as None and tuples as lists, or a TypeError that says what
    JSON cannot hold.

    Example:
        >>> json_safe({"a": (1, float("nan"))})
        {'a': [1, None]}
    """
    return json.loads(json.dumps(without_nan(value), default=_refuse))


def _refuse(value: object) -> None:
    raise TypeError(
        f"{value!r} is a {type(value).__name__}; rows hold strings, numbers, booleans, None and"
        " lists of them. Use .item() or .tolist()."
    )
