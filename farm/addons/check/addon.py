"""The add-on `check`: whether a card is as fast as its kind and as it was."""

from farm.types.add_on import AddOn, Command

ADD_ON = AddOn(
    "check",
    commands=(
        Command(
            "cards check",
            "farm.addons.check.commands:check",
            "farm cards check --card 0",
            "Jobs and cards",
        ),
    ),
    card_checks="farm.addons.check.regular",
    card_history="farm.addons.check.commands:card_history",
)
