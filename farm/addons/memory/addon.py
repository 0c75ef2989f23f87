"""The add-on `memory`: tensors in slow memory, and the memory of training steps."""

from farm.types.add_on import AddOn, Command

ADD_ON = AddOn(
    "memory",
    commands=(
        Command(
            "memory",
            "farm.addons.memory.commands:memory",
            "farm memory resnet50 -b 32 --fast 50%",
            "Measure",
        ),
    ),
    public={"farm.addons.memory.queries": "fits step_memory"},
    handlers="farm.addons.memory.handlers:HANDLERS",
    offload="farm.addons.memory.offload:offload",
)
