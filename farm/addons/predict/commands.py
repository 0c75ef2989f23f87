"""``farm predict``: predict operators that were never measured from those that were."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import output
from cli.options import NOT_PLAIN, AsJson, Declared, sizes
from cli.output import answer, emit, emit_json, say, show
from farm.errors import UsageError, writing_to

if TYPE_CHECKING:
    from farm.addons.predict.dataset import Dataset, MeasuredModel
    from farm.addons.predict.evaluation import Evaluation, HeldOutPredictions
    from farm.addons.predict.predictors import PredictorSpec

app = typer.Typer(
    help="Predict time, power and energy of operators without a reading, and evaluate predictors.",
    no_args_is_help=True,
)


@dataclass(frozen=True)
class Readings:
    """The readings from which predictors learn; `options.toml` has the texts of these options."""

    card: str = ""
    torch: str = ""

    def training_set(self) -> tuple[Dataset, list[MeasuredModel]]:
        """The readings and models of one's own database, or those of the package."""
        from farm.addons.predict import query

        return output.first_that_knows(
            lambda session: query.training_set(session, self.card, self.torch)
        )


@app.command(epilog="Example: farm predict dataset dataset.parquet --card H200")
def dataset(target: Path, readings: Readings, as_json: AsJson = False) -> None:
    """Write the training data of predictors: a row for each tuple."""
    from farm.addons.predict.query import write_dataset

    data, _ = readings.training_set()
    write_dataset(data, target)
    if as_json:
        emit_json(
            {
                "file": str(target),
                "rows": len(data),
                "key": data.key,
                **data.conditions.to_json(),
            }
        )
    else:
        emit(f"{target}  {_about(data)}")


@app.command(epilog="Example: farm predict fit --card H200")
def fit(
    predictor: str = "best", *, readings: Readings, out: Path | None = None, as_json: AsJson = False
) -> None:
    """Fit a predictor to the readings and store it as arrays, for `farm estimate`."""
    from farm.addons.predict import evaluation, stored_predictor
    from farm.addons.predict.predictors import predictor_spec
    from farm.addons.predict.regressors import needs_scikit_learn

    if out is not None and out.suffix != ".npz":
        raise UsageError(
            f"The name '{out}' does not end in .npz.",
            "Name the file like this: --out predictor.npz",
        )
    spec = predictor_spec(predictor)
    needs_scikit_learn()
    data, models = readings.training_set()
    stored = evaluation.fit(spec, data, models, say)
    path = out or stored_predictor.folders()[0] / stored_predictor.file_name(data.conditions)
    stored_predictor.save(stored, path)
    if as_json:
        emit_json(
            {
                "file": str(path),
                "rows": stored.rows,
                "key": stored.key,
                "calibration": stored.calibration.to_json(),
            }
        )
    else:
        number = stored.calibration.families
        families = "1 model family" if number == 1 else f"{number} model families"
        learned = f"{stored.rows} tuples of {families}"
        emit(f"{path}  predictor {predictor}, fitted to {learned}")


@app.command(epilog="Example: farm predict evaluate best --card H200")
def evaluate(
    predictors: list[str] | None = None,
    *,
    readings: Readings,
    on: str = "",
    across: str = "",
    folds: bool = True,
    curve: bool = False,
    png: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate predictors with random tuples left out, and with a whole family of models left
    out.
    """
    from farm.addons.predict import tables
    from farm.addons.predict.predictors import PREDICTORS, predictor_spec

    specs = [predictor_spec(name) for name in predictors or PREDICTORS]
    if png is not None:
        from farm.addons.pages.plots import check_path

        check_path(png)
    if across:
        evaluated = _fitted_to_another_card(
            readings, across, specs[-1] if predictors else predictor_spec("best")
        )
    elif on:
        evaluated = _stored_on_other_readings(readings, on)
    else:
        evaluated = _held_out(readings, specs, folds=folds, curve=curve)
    description, held_out = evaluated.description, evaluated.held_out
    answer(
        as_json,
        evaluated.to_json(),
        lambda: tables.evaluations(evaluated.evaluations, description, held_out),
    )
    if png is not None and not len(evaluated.data):
        say(f"{png} is not drawn: the predictor has learned from every tuple of these readings.")
    elif png is not None:
        from farm.addons.predict.plots import draw_evaluation

        name = evaluated.evaluations[-1].predictor
        title = f"{name}: {description}"
        draw_evaluation(evaluated.data, evaluated.predictions, png, title, held_out)
        say(f"Drawn to {png}")


@app.command(epilog="Example: farm predict plan resnet50 --card H100")
def plan(
    models: list[str],
    *,
    batch: str | None = None,
    given: Annotated[dict[str, Any], Declared(without=NOT_PLAIN)],
    tuples: int = 60,
    readings: Readings,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """List the measurements that would reduce the error of some models most, as a file for `farm
    run -f`.
    """
    from farm.addons.predict import next_measurements, tables
    from farm.addons.predict.estimate_command import estimated
    from farm.addons.predict.query import EstimateQuery
    from farm.requests.partial_request import usual_variant

    query = EstimateQuery(readings.card, torch=readings.torch)
    kind = query.kind()
    variants = [
        usual_variant(name, kind, batch=size, **given)
        for name, size in itertools.product(models, sizes("--batch", batch))
    ]
    output.say_differences(variants)
    estimates = [estimated(variant, query) for variant in variants]
    if not any(estimate.total for estimate in estimates):
        raise UsageError(
            f"No predictor is stored for {estimates[0].card_model}, so it is unknown which tuples "
            "are uncertain.",
            f"Fit a predictor: `farm predict fit --card '{estimates[0].card_model}'`",
        )
    proposal = next_measurements.plan(estimates, tuples)
    if out is not None:
        with writing_to(out):
            out.write_text(proposal.file)
    if as_json:
        emit_json(proposal.to_json())
    elif not proposal.proposals:
        say("Every tuple of these models has a reading: there is nothing to measure.")
    else:
        show(tables.plan(proposal))
        step = f"Measure these tuples with `farm run -f {out}`."
        say(
            step
            if out is not None
            else "--out FILE writes a measurement file of these tuples for `farm run -f FILE`."
        )


@dataclass(frozen=True)
class _Evaluated:
    """What `farm predict evaluate` prints and draws."""

    data: Dataset
    evaluations: Sequence[Evaluation]
    predictions: HeldOutPredictions  # of the last evaluation
    description: str
    held_out: str  # what the predictors did not learn from

    def to_json(self) -> dict[str, Any]:
        return {
            "about": self.description,
            "key": self.data.key,
            "evaluations": [evaluation.to_json() for evaluation in self.evaluations],
        }


def _held_out(
    readings: Readings, specs: Sequence[PredictorSpec], *, folds: bool, curve: bool
) -> _Evaluated:
    """Evaluate predictors on tuples and families that they have not learned."""
    from farm.addons.predict import evaluation
    from farm.addons.predict.regressors import needs_scikit_learn

    needs_scikit_learn()
    data, models = readings.training_set()
    evaluations = []
    for spec in specs:
        scores, predictions = evaluation.evaluate(
            spec, data, models, folds=folds, curve=curve, say=say
        )
        evaluations.append(scores)
    whole = sum(model.cost is not None for model in models)
    description = _about(data).replace("tuples", f"tuples and {whole} whole models", 1)
    return _Evaluated(data, evaluations, predictions, description, "one model family left out")


def _fitted_to_another_card(readings: Readings, card: str, spec: PredictorSpec) -> _Evaluated:
    """Fit a predictor to the readings and evaluate it on those of ``card``."""
    from farm.addons.predict import evaluation

    train, _ = readings.training_set()
    data, models = Readings(card).training_set()
    compared = evaluation.evaluate_fitted(spec.fit(train), data, models)
    return _outside_training(data, compared, f"fitted to readings of {train.card.model}")


def _stored_on_other_readings(readings: Readings, on: str) -> _Evaluated:
    """Evaluate the stored predictor on the readings of a database that it has not learned. Raises
    `UsageError` if no predictor is stored for their card.
    """
    from farm.addons.predict import evaluation, query, stored_predictor

    with query.database_at(on).read() as session:
        everything, models = query.training_set(session, readings.card, readings.torch)
    card_model, conditions = everything.card.model, everything.conditions
    stored = stored_predictor.find(
        stored_predictor.folders(), card_model, conditions.software.torch, conditions.protocol
    )
    if stored is None:
        raise UsageError(
            f"No predictor is stored for {card_model}.",
            f"Fit a predictor: `farm predict fit --card '{card_model}'`",
        )
    data = everything.where(~stored.has_learned(call.operator_id for call in everything.calls))
    compared = evaluation.evaluate_fitted(
        stored.fitted, data, models, stored.calibration, everything
    )
    return _outside_training(data, compared, f"stored in {stored.path}")


def _outside_training(
    data: Dataset, compared: tuple[Evaluation, HeldOutPredictions], origin: str
) -> _Evaluated:
    scores, predictions = compared
    description = f"{_about(data)}; predictor {scores.predictor}, {origin}"
    return _Evaluated(data, [scores], predictions, description, "tuples outside the training data")


def _about(data: Dataset) -> str:
    return f"{len(data)} tuples of {data.card.model}, torch {data.conditions.software.torch}"
