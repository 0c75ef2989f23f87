"""Products beside the core, one package each. The core finds them through `farm.extensions` and
never imports them.

The file addon.py of a package lists its commands and what else it adds; `farm.types.add_on` is the
interface. `check` checks cards, `memory` is for slow memory and training steps, `pages` draws, and
`predict` estimates."""
