"""The catalog of models and its sources: one module per source.

Read first: `entry` is a model of the catalog, `source` the contract of a source. `catalog` finds a
model by its name, and `resolved` has the model that was found. The sources: `torchvision`, `timm`,
`transformers` (with `configurations`) and the user's own models (`own`, `config_folder`).
`building` builds modules and inputs, `texts/` makes token ids, `quantization` replaces weights, and
`user_code` runs code of users without its effects on the process."""
