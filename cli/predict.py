"""``farm predict``: what was never measured, from what was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import opening
from cli.options import AsJson, variant_options
from cli.output import emit, emit_json, say, show

if TYPE_CHECKING:
    from farm.prediction.dataset import Dataset
    from farm.prediction.measured_models import ReadModel

app = typer.Typer(
    help="Predict time, power and energy of operators that nobody has read, and say how well.", no_args_is_help=True
)
Card = Annotated[str, typer.Option(help="Part of the card's model. Default: the only one with readings.")]
Torch = Annotated[str, typer.Option(help="Readings of this version, e.g. 2.11. Default: those that are most.")]


def chosen(card: str, torch: str) -> tuple[Dataset, list[ReadModel]]:
    """The readings and models of one's own database, or those that come with the package."""
    from farm.estimate.training_set import learnt_from

    return opening.first_that_knows(lambda session: learnt_from(session, card, torch), lambda _: True)


@app.command()
def dataset(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A .parquet or .csv file.")],
    card: Card = "",
    torch: Torch = "",
    as_json: AsJson = False,
) -> None:
    """Write the readings as predictors learn from them: one row a tuple."""
    from farm.estimate.training_set import write_dataset

    found, _ = chosen(card, torch)
    write_dataset(found, target)
    if as_json:
        emit_json({"file": str(target), "rows": len(found), "key": found.key, **found.circumstances.to_json()})
    else:
        emit(f"{target}  {len(found)} tuples of {found.card.model}, torch {found.circumstances.software.torch}")


def folders() -> list[Path]:
    """Where predictors are kept: one's own first, then those that come with the package."""
    from farm.prediction.predictor_store import FOLDER
    from farm.settings import settings

    return [settings().state_dir / "predictors", FOLDER]


@app.command()
def fit(
    predictor: Annotated[str, typer.Argument(metavar="[PREDICTOR]", help="Which.")] = "best",
    card: Card = "",
    torch: Torch = "",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .npz file. Default: where `farm estimate` looks.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Learn from the readings, and keep what was learnt as arrays: what `farm estimate` predicts with."""
    from farm.errors import UsageError
    from farm.prediction import predictor_store
    from farm.prediction.evaluation import fit as learn
    from farm.prediction.predictors import recipe
    from farm.prediction.regressor import needs_scikit_learn

    if out is not None and out.suffix != ".npz":
        raise UsageError(f"'{out}' is no .npz file.", "Name one: --out h200.npz")
    made = recipe(predictor)
    needs_scikit_learn()
    data, models = chosen(card, torch)
    found = learn(made, data, models, say)
    path = out or folders()[0] / predictor_store.file_name(data.circumstances)
    predictor_store.save(found, path)
    if as_json:
        emit_json({"file": str(path), "rows": found.rows, "key": found.key, "calibration": found.calibration.to_json()})
    else:
        emit(f"{path}  {predictor}, of {found.rows} tuples and {found.calibration.families} families of models")


@app.command()
def evaluate(
    predictors: Annotated[
        list[str] | None, typer.Argument(metavar="[PREDICTOR]...", help="Which of them. Default: all.")
    ] = None,
    card: Card = "",
    torch: Torch = "",
    on: Annotated[
        str,
        typer.Option(
            metavar="DATABASE",
            help="Ask the predictor that is kept for the card, which learns nothing, and hold it against the readings of this "
            "database: a URL, or a folder that was exported.",
        ),
    ] = "",
    across: Annotated[
        str, typer.Option(metavar="CARD", help="Learn from --card and predict this card, through portable features.")
    ] = "",
    folds: Annotated[bool, typer.Option("--folds/--no-folds", help="Ten folds, too.")] = True,
    curve: Annotated[bool, typer.Option("--curve", help="Learning curves, too.")] = False,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw predicted against measured (.png, .svg or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how well predictors predict: ten folds, and a whole family of models left out."""
    from cli import predict_table
    from farm.pages import plots
    from farm.prediction.evaluation import evaluate as evaluated
    from farm.prediction.predictors import RECIPES, recipe
    from farm.prediction.regressor import needs_scikit_learn

    recipes = [recipe(name) for name in predictors or RECIPES]
    if png is not None:
        plots.check_path(png)
    if on or across:
        _held_against(card, torch, on, across, recipes[-1].name if predictors else "", as_json)
        return
    needs_scikit_learn()
    data, models = chosen(card, torch)
    found, drawn = [], None
    for one in recipes:
        evaluation, held = evaluated(one, data, models, folds=folds, curve=curve, say=say)
        found.append(evaluation)
        drawn = held
    read = sum(model.time_us is not None for model in models)
    about = (
        f"{len(data)} tuples and {read} whole models of {data.card.model}, torch {data.circumstances.software.torch}"
    )
    if as_json:
        emit_json({"about": about, "key": data.key, "evaluations": [_plain(one.to_json()) for one in found]})
    else:
        show(predict_table.evaluations(found, about))
    if png is not None and drawn is not None:
        from farm.pages.plots import draw_evaluation

        draw_evaluation(data, drawn, png, f"{recipes[-1].name}: {about}")
        say(f"Drawn to {png}")


@app.command()
@variant_options(without=["batch"])
def plan(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="What is to be predicted better.")],
    batch: Annotated[
        list[int] | None, typer.Option("-b", "--batch", min=1, help="Batch size. May be repeated. Default: 32.")
    ] = None,
    given: dict[str, Any] = {},  # noqa: B006 - replaced by options
    tuples: Annotated[int, typer.Option("-n", "--tuples", min=1, help="How many to read.")] = 60,
    card: Card = "",
    torch: Torch = "",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the measurement file there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which readings would lower the error of some models most, as a measurement file for `farm run -f`."""
    from cli import predict_table
    from cli.estimate import estimated
    from farm.errors import UsageError
    from farm.estimate import next_measurements
    from farm.models import catalog
    from farm.requests.partial_request import default_dtype

    estimates = []
    for name in models:
        for size in batch or [32]:
            variant = catalog.variant(name, size, **{"dtype": default_dtype(name, "cuda"), **given})
            estimates.append(estimated(variant, card, torch))
    if not any(one.total_time for one in estimates):
        raise UsageError(
            f"No predictor is kept for {estimates[0].card_model}, which would say what it is unsure of.",
            "Fit one: farm predict fit --card ...",
        )
    found = next_measurements.plan(estimates, tuples)
    if out is not None:
        try:
            out.write_text(found.file)
        except OSError as error:
            raise UsageError(f"'{out}' cannot be written: {error.strerror or error}.", "Name another file.") from error
    if as_json:
        emit_json(found.to_json())
    elif not found.wishes:
        say("Readings cover every tuple of these models.")
    else:
        show(predict_table.plan(found))
        say(f"farm run -f {out}" if out is not None else "--out FILE writes the measurement file.")


def _held_against(card: str, torch: str, on: str, across: str, predictor: str, as_json: bool) -> None:
    """A predictor that has learnt, against readings that it has not learnt from."""
    from cli import predict_table
    from farm.errors import UsageError
    from farm.estimate.training_set import learnt_from, opened
    from farm.prediction import predictor_store
    from farm.prediction.evaluation import across_cards, held_against
    from farm.prediction.predictors import recipe

    if across:
        learnt, _ = chosen(card, torch)
        data, models = chosen(across, "")
        found, about = (
            across_cards(recipe(predictor or "best"), learnt, data, models),
            f"learnt from {learnt.card.model}",
        )
    else:
        with opened(on).read() as session:
            data, models = learnt_from(session, card, torch)
        protocol = data.circumstances.protocol
        there = predictor_store.find(
            folders(), data.card.model, data.circumstances.software.torch, protocol.launch, protocol.tf32
        )
        if there is None:
            raise UsageError(f"No predictor is kept for {data.card.model}.", "Fit one: farm predict fit --card ...")
        new = data.where([not learnt for learnt in there.has_learnt(call.operator_id for call in data.calls)])
        found = held_against(there.fitted, new, models, there.calibration, data)
        data, about = new, f"kept in {there.path}"
    about = f"{len(data)} tuples of {data.card.model}, torch {data.circumstances.software.torch}; {found.predictor}, {about}"
    if as_json:
        emit_json({"about": about, "key": data.key, "evaluations": [_plain(found.to_json())]})
    else:
        show(predict_table.evaluations([found], about, "tuples that were not learnt from"))


def _plain(tree: Any) -> Any:
    """Without what is not a number, which JSON lacks."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(value) for value in tree]
    return None if isinstance(tree, float) and tree != tree else tree
