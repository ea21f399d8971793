"""The agent's side: a mixin that makes the training context known inside an agent's rollout methods.

The methods are wrapped where a class is defined, in the class itself, so that what upstream looks at
stays as it is: ``LitAgent.is_async()`` compares class attributes, the legacy runner inspects
signatures, and pickle looks methods up by name.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from agl_meta.context import TrainingContext, current_training_context, enter, is_current, leave
from agl_meta.emitting import announce_tracer, emit_prediction
from agl_meta.errors import ConfigurationError
from agl_meta.files import AnyPath
from agl_meta.outcome import note_outcome, record_outcome
from agl_meta.ports import check_store_port
from agl_meta.saving import current_rollout_dir, current_step_dir, save_prediction
from agl_meta.storage import settle_root

_SYNC_METHODS = ("rollout", "training_rollout", "validation_rollout")
_ASYNC_METHODS = ("rollout_async", "training_rollout_async", "validation_rollout_async")

_WRAPPED = "_agl_meta_wrapped"
# A mark on the functions themselves would be copied by a user's ``functools.wraps``.
_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
# Those of them that pass calls on to the next class in the tree.
_forwarders: weakref.WeakSet[Any] = weakref.WeakSet()

# The v0.1 signature hands the rollout method an id only; the task, with its metadata, is seen by
# ``on_rollout_start`` alone, which the legacy runner calls in the same thread or asyncio task.
_announced: contextvars.ContextVar[Any] = contextvars.ContextVar("agl_meta_announced_task", default=None)


class TrainingContextMixin:
    """Gives an agent ``self.training_context`` and saves its predictions into per-step folders.

    Stands before or behind ``LitAgent`` in the list of bases::

        class SqlAgent(agl_meta.TrainingContextMixin, agl.LitAgent):
            def rollout(self, task, resources, rollout):
                answer = ...
                if not self.training_context.is_train:
                    self.save_prediction(answer)
                return reward(answer)

    It adds no state to the agent and changes neither results nor exceptions. A class that defines
    ``__init_subclass__`` must call ``super().__init_subclass__()`` as usual in Python; where it does
    not, the first use of an attribute below raises a
    :class:`~agl_meta.errors.ConfigurationError`.
    """

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_names(cls)
        for name in (*_SYNC_METHODS, *_ASYNC_METHODS):
            _wrap_method(cls, name)
        _wrap_hook(cls, "on_rollout_start", _started)
        _wrap_hook(cls, "on_rollout_end", _ended)
        setattr(cls, _WRAPPED, True)

    def set_trainer(self, trainer: Any) -> None:
        """As upstream's, which ``Trainer.fit`` calls before anything else: the time to refuse a port.

        Raises :class:`~agl_meta.errors.ConfigurationError` if the store's port is in use, where upstream
        would only say that its server did not start.
        """
        check_store_port(trainer)
        super().set_trainer(trainer)  # type: ignore[misc]

    @property
    def training_context(self) -> TrainingContext:
        """Where in training the rollout stands that runs here.

        Raises :class:`~agl_meta.errors.NotInRolloutError` outside a rollout and in a thread that was
        started without the rollout's context.
        """
        _check_is_wrapped(type(self))
        return current_training_context()

    @property
    def step_dir(self) -> AnyPath:
        """Folder of the running pass, made on first use: ``<output_dir>/global_step_40/val``.

        Shared with the other rollouts of the pass. Raises as :meth:`save_prediction` does, and
        :class:`OSError`.
        """
        _check_is_wrapped(type(self))
        return current_step_dir()

    @property
    def rollout_dir(self) -> AnyPath:
        """Folder of the running rollout alone, made on first use, for files of its own.

        Lies at ``<step_dir>/files/<rollout>``. Raises as :meth:`save_prediction` does, and
        :class:`OSError`.
        """
        _check_is_wrapped(type(self))
        return current_rollout_dir()

    def save_prediction(self, value: object, name: str = "prediction") -> AnyPath | None:
        """Save ``value`` as it is now, under the step, split and rollout that run here.

        May be called any number of times, with the same or another ``name``. Returns the file that
        holds the record, or ``None`` if it could not be written: the loss is logged and counted,
        and the rollout goes on. Raises :class:`~agl_meta.errors.NotInRolloutError` outside a
        rollout and :class:`~agl_meta.errors.OutputDirError` if the training has no output folder.
        """
        _check_is_wrapped(type(self))
        return save_prediction(value, name)

    def emit_prediction(self, value: object, name: str = "prediction") -> bool:
        """Put ``value`` as it is now into a span of the running rollout, for the store.

        It stands in the rows of the pass as what was saved does, and
        :func:`agl_meta.collect_emitted` fetches it from the store. Returns whether the tracer took it.
        Raises :class:`~agl_meta.errors.NotInRolloutError` outside a rollout.
        """
        _check_is_wrapped(type(self))
        return emit_prediction(value, name)


def _check_names(cls: type) -> None:
    """Refuse a class in which another base hides what the mixin gives."""
    for name in ("training_context", "step_dir", "rollout_dir", "save_prediction", "emit_prediction"):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if not issubclass(owner, TrainingContextMixin):
            raise ConfigurationError(
                f"{cls.__qualname__}: {owner.__qualname__} stands before TrainingContextMixin and "
                f"defines {name!r}, which hides the mixin's. Put TrainingContextMixin first: "
                f"class {cls.__name__}(agl_meta.TrainingContextMixin, …), or rename that attribute."
            )


def _check_is_wrapped(cls: type) -> None:
    if _WRAPPED not in vars(cls):
        raise ConfigurationError(
            f"{cls.__qualname__} was defined without running TrainingContextMixin.__init_subclass__: "
            "one of its other bases does not pass it on. Put agl_meta.TrainingContextMixin first in "
            "the list of bases, or call super().__init_subclass__(**kwargs) in that base."
        )


def _find(cls: type, name: str) -> tuple[type, Any] | None:
    """The class in the tree that defines ``name``, and the raw attribute."""
    for base in cls.__mro__:
        if name in vars(base):
            return base, vars(base)[name]
    return None


def _is_upstream_default(owner: type) -> bool:
    # LitAgent's own methods only raise, or call the ones below. Wrapping them would define, say,
    # ``rollout_async`` on the agent's class, and make ``is_async()`` true of every agent.
    return owner.__name__ == "LitAgent" and owner.__module__.split(".")[0] == "agentlightning"


def _wrap_method(cls: type, name: str) -> None:
    _drop_forwarder(cls, name)
    found = _find(cls, name)
    if found is None or _is_upstream_default(found[0]) or _is_wrapper(found[1]):
        return
    owner, attribute = found
    call = _caller(cls, owner, name, attribute)
    names = _positional_names(attribute, owner)
    __class__ = None  # see _share_class_cell

    async def wrapper_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Visit(names, args, kwargs) as visit:
            visit.returned = await call(self, *args, **kwargs)
            return visit.returned
        return __class__

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Visit(names, args, kwargs) as visit:
            visit.returned = call(self, *args, **kwargs)
            return visit.returned
        return __class__

    _install(cls, name, wrapper_async if name in _ASYNC_METHODS else wrapper, attribute, owner)


def _wrap_hook(cls: type, name: str, before: Callable[..., None]) -> None:
    """Wrap a hook that only the legacy runner (v0) calls, with positional arguments."""
    _drop_forwarder(cls, name)
    found = _find(cls, name)
    if found is None or _is_wrapper(found[1]):
        return
    owner, attribute = found
    call = _caller(cls, owner, name, attribute)
    __class__ = None  # see _share_class_cell

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return call(self, *args, **kwargs)
        return __class__

    _install(cls, name, wrapper, attribute, owner)


# Functions, since cloudpickle sends the wrappers of a script's class by value, with the globals that they
# name, and can't send a ContextVar.


def _started(task: Any = None, runner: Any = None, tracer: Any = None, *_: Any, **__: Any) -> None:
    _announced.set(task)
    announce_tracer(tracer)


def _ended(task: Any = None, rollout: Any = None, *_: Any, **__: Any) -> None:
    note_outcome(task, rollout)


def _caller(cls: type, owner: type, name: str, attribute: Any) -> Callable[..., Any]:
    if owner is not cls:
        # Looked up at each call: a subclass may put another base in between.
        return lambda self, *args, **kwargs: getattr(super(cls, self), name)(*args, **kwargs)
    if isinstance(attribute, FunctionType):
        return attribute
    if hasattr(attribute, "__get__"):  # staticmethod, classmethod, compiled functions, …
        return lambda self, *args, **kwargs: attribute.__get__(self, type(self))(*args, **kwargs)
    return lambda self, *args, **kwargs: attribute(*args, **kwargs)


def _drop_forwarder(cls: type, name: str) -> None:
    # attrs.define and dataclass(slots=True) make a class anew, from all that stands in the first one: what
    # passes calls on from there can't do so from the new class.
    if _is_forwarder(vars(cls).get(name)):
        delattr(cls, name)


def _install(cls: type, name: str, wrapper: Any, attribute: Any, owner: type) -> None:
    if owner is cls:
        wrapper = _share_class_cell(wrapper, attribute)
    else:
        _forwarders.add(wrapper)
    functools.update_wrapper(wrapper, attribute)
    if not isinstance(attribute, FunctionType):
        # ``inspect.signature`` would follow ``__wrapped__`` and drop a parameter too many.
        vars(wrapper).pop("__wrapped__", None)
        signature = _signature(attribute, owner)
        if signature is not None:
            wrapper.__signature__ = signature  # type: ignore[attr-defined]
    _wrappers.add(wrapper)
    setattr(cls, name, wrapper)


def _share_class_cell(wrapper: Any, attribute: Any) -> Any:
    """The wrapper, with the cell of the method's own ``__class__`` in its closure.

    It is what ``super()`` reads. A decorator that makes the class anew looks for it in the closures of what
    stands in the class, as attrs does, and puts the new class into it.
    """
    method = attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute
    if not isinstance(method, FunctionType):
        return wrapper
    cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
    if "__class__" not in cells:
        return wrapper
    own = zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True)
    closure = tuple(cells["__class__"] if name == "__class__" else cell for name, cell in own)
    return FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, None, closure)


def _is_wrapper(attribute: Any) -> bool:
    return isinstance(attribute, FunctionType) and attribute in _wrappers


def _is_forwarder(attribute: Any) -> bool:
    return isinstance(attribute, FunctionType) and attribute in _forwarders


def _signature(attribute: Any, owner: type) -> inspect.Signature | None:
    """Signature of a method, with the parameter for ``self`` first."""
    has_self = not isinstance(attribute, (staticmethod, classmethod))
    if hasattr(attribute, "__get__"):
        attribute = attribute.__get__(None, owner)
    else:
        has_self = False
    try:
        signature = inspect.signature(attribute)
    except (TypeError, ValueError):
        return None
    if has_self:
        return signature
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    rest = signature.parameters.values()
    return signature.replace(parameters=[self, *(p for p in rest if p.name != "self")])


def _positional_names(attribute: Any, owner: type) -> tuple[str, ...]:
    signature = _signature(attribute, owner)
    if signature is None:
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in signature.parameters.values() if p.kind in kinds)[1:]


class _Visit:
    """One call of a rollout method: enters the context of the rollout that it is called for.

    Does nothing where that is entered already (``training_rollout`` calls ``rollout``), and where the call
    names no rollout: a user's own call from a test, say, which stays outside.
    """

    __slots__ = ("_began", "_token", "returned")

    def __init__(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        settle_root()
        rollout = _called_for(names, args, kwargs)
        self.returned: Any = None
        self._token = None if rollout is None or is_current(rollout) else enter(rollout)
        self._began = time.time()

    def __enter__(self) -> _Visit:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._token is not None:
            record_outcome(error, self.returned, self._began)
            leave(self._token)


def _called_for(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any | None:
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    values = (named.get("rollout"), *args, *kwargs.values())
    for value in values:
        if _is_rollout(value):
            return value
    rollout_id = named.get("rollout_id")
    task = _announced.get()
    # Arguments of a user's own call may be anything, and compare as they like.
    if issubclass(type(rollout_id), str) and getattr(task, "rollout_id", None) == rollout_id:
        return task
    return named.get("rollout")


def _is_rollout(value: Any) -> bool:
    upstream = sys.modules.get("agentlightning.types")
    if upstream is None:
        return False
    try:
        return isinstance(value, (upstream.Rollout, upstream.RolloutLegacy))
    except Exception:  # of the value's own code: it is asked for its ``__class__``
        return False
