"""The add-on `predict`: estimates of models, and predictions of operators without a reading."""

from farm.types.add_on import AddOn, Command

_GROUP = "Ask, without measuring"

ADD_ON = AddOn(
    "predict",
    commands=(
        Command(
            "estimate",
            "farm.addons.predict.estimate_command:estimate",
            "farm estimate llama-3.2-1b -b 1..64 --card H200",
            _GROUP,
        ),
        Command(
            "predict",
            "farm.addons.predict.commands:app",
            "farm predict plan resnet50 --card H100",
            _GROUP,
        ),
    ),
    public={
        "farm.addons.predict.estimate": "Estimate",
        "farm.addons.predict.queries": "estimate predict",
        "farm.addons.predict.summary": "Summary summary",
    },
)
