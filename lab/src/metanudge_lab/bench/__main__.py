"""`python -m metanudge_lab.bench …`: measure with nothing but torch and numpy installed.

Pictures are drawn from the results later, by `metanudge bench --draw FILE`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import types
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any

from metanudge.cli.program import finish, prepare
from metanudge.training.errors import EXIT_BAD_INPUT, UserError
from metanudge_lab.bench.config import BenchConfig


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    config = BenchConfig(**vars(parser().parse_args(argv)))
    if config.draw:
        print(
            "error: pictures need matplotlib. Draw them where it is installed: metanudge bench"
            " --draw FILE.",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    try:
        return measure(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def measure(config: BenchConfig) -> int:
    """Run the benchmark and print plain tables."""
    from metanudge_lab.bench.run import run, show
    from metanudge_lab.progress import Lines

    failed = 0
    for file, result in run(config, Lines()):
        for table in show(result):
            print(f"\n{table}", flush=True)
        print(f"\njson: {file}\n", flush=True)
        failed += sum(row["package"] == "metanudge" for row in result.get("failed", ()))
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The options of `BenchConfig`, each explained by the string below it."""
    made = argparse.ArgumentParser(
        prog="python -m metanudge_lab.bench", description=BenchConfig.__doc__
    )
    kinds, helps = typing.get_type_hints(BenchConfig), _explanations()
    for field in dataclasses.fields(BenchConfig):
        kind = kinds[field.name]
        options: dict[str, Any] = {
            "default": field.default,
            "help": f"{helps[field.name]} Default: {_text(field.default)}.".replace("%", "%%"),
        }
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is tuple:
            options |= {"nargs": "+", "type": typing.get_args(kind)[0], "action": _Tuple}
        elif typing.get_origin(kind) is typing.Literal:
            options["choices"] = typing.get_args(kind)
        else:
            options["type"] = (
                typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
            )
        made.add_argument(f"--{field.name.replace('_', '-')}", **options)
    return made


class _Tuple(argparse.Action):
    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


def _explanations() -> dict[str, str]:
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(BenchConfig)).body
        if isinstance(node, ast.ClassDef)
    )
    found = {}
    for field, text in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
        ):
            found[field.target.id] = str(ast.literal_eval(text.value))
    return found


def _text(default: object) -> str:
    if default is None or default == ():
        return "none"
    return str(default) if isinstance(default, Path) else f"{default}".lower()


if __name__ == "__main__":
    prepare()
    sys.exit(finish(main()))
