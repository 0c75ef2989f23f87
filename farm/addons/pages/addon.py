"""The add-on `pages`: results as pages and drawings."""

from farm.types.add_on import AddOn, Command

ADD_ON = AddOn(
    "pages",
    commands=(
        Command("publish", "farm.addons.pages.commands:publish", "farm publish site", "Results"),
    ),
    pages="farm.addons.pages.results",
)
