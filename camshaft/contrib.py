"""Placeholder: importing it raises an error that names the replacements of the contrib package."""

raise ImportError(
    "camshaft has no contrib package. Instead of ignite.contrib.handlers import from camshaft.handlers, and leave "
    "'from ignite.metrics import ...' as it is where it was ignite.contrib.metrics. Instead of "
    "setup_common_training_handlers attach the handlers that you need to the trainer; instead of "
    "create_supervised_tbptt_trainer write the step and pass it to camshaft.engine.Engine.",
    name=__name__,
)
