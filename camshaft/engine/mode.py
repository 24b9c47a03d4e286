"""The mode of a model, training or evaluation, in the runs of engines that share it."""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any, ClassVar

from torch import nn

from camshaft.engine.events import Events, Order

_in_training = attrgetter("training")


class Mode:
    """Keeps a model in train or eval mode, except for modules that the user switches between two steps.

    At the start of a run all modules are switched; a frozen backbone is put into eval mode in a handler of ``STARTED``
    or later. What an evaluation has switched is switched back when an epoch starts, before its handlers, or by the next
    step. If the user switches the whole model, each module gets back the mode that it had in the last step.

    Switching visits every module in Python; looking at their flags takes a tenth of that. The modules are listed once
    per epoch.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    >>> mode = Mode(model, training=True)
    >>> mode(None)
    >>> _ = model[1].eval()
    >>> mode(None)
    >>> model.training, model[1].training
    (True, False)
    """

    _evaluated: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()  # switched by steps of evaluation

    def __init__(self, model: Any, training: bool) -> None:
        self._model = model
        self._training = training
        self._modules: list[nn.Module] = []
        self._flags: list[bool] = []  # in the last step
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # which the user has switched to the other mode

    def attach(self, engine: Any) -> None:
        """Switch the model when runs and epochs of an engine start, before the handlers of users."""
        if isinstance(self._model, nn.Module):
            engine.add_event_handler(Events.STARTED, self._start_run, order=Order.STEP)
            engine.add_event_handler(Events.EPOCH_STARTED, self._start_epoch, order=Order.STEP)

    def _start_run(self) -> None:
        self._others.clear()
        self._modules = list(self._model.modules())
        if any(one.training is not self._training for one in self._modules):
            self._switch()

    def _start_epoch(self, engine: Any) -> None:
        if self._flags:
            self(engine)

    def __call__(self, engine: Any) -> None:
        """Switch the modules that are not in their mode. They are listed again when an epoch of the engine starts."""
        if not isinstance(self._model, nn.Module):
            self._switch()
            return
        known, modules = self._modules, self._modules
        if not known or engine is None or engine.iteration_in_epoch <= 1:
            self._modules = modules = list(self._model.modules())
        if list(map(_in_training, modules)) == self._flags:
            return
        others = weakref.WeakSet(one for one in known if one.training is not self._training)
        if self._model.training is not self._training and self._model not in self._evaluated:
            others &= self._others
        elif self._training:
            others -= self._evaluated
        self._others = others
        self._switch()

    def _switch(self) -> None:
        modules = list(self._model.modules()) if isinstance(self._model, nn.Module) else []
        if self._training:
            self._model.train()
            self._evaluated.difference_update(modules)
        else:
            self._evaluated.update(one for one in modules if one.training)
            self._model.eval()
        for one in self._others:
            one.training = not self._training
        self._flags = list(map(_in_training, modules))
