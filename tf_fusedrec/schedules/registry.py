"""Schedules by name. The config of a saved model holds the name of its schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tf_fusedrec.schedules.schedule import Schedule

_Class = TypeVar("_Class", bound=type[Schedule])
_schedules: dict[str, type[Schedule]] = {}


def register(name: str) -> Callable[[_Class], _Class]:
    """Decorator of a Schedule class: saved models store its schedules under this name.

    A program that loads such a model registers the class first, under the same name. Registration of another class
    with the same module and name replaces the first one, so that a notebook cell may run twice.

    Args:
      name: Any string. tf_fusedrec's own schedules have names without a ">"; "my_package>name" cannot clash with them.

    Raises:
      TypeError: the decorated object is no Schedule class.
      ValueError: another class has this name.
    """

    def add(schedule: _Class) -> _Class:
        if not (isinstance(schedule, type) and issubclass(schedule, Schedule)):
            raise TypeError(f"register({name!r}) got {schedule!r}, and takes a subclass of schedules.Schedule.")
        other = _schedules.get(name, schedule)
        if (other.__module__, other.__qualname__) != (schedule.__module__, schedule.__qualname__):
            raise ValueError(
                f"register got the name {name!r} for {schedule.__qualname__}, and {other.__module__}."
                f"{other.__qualname__} has it. Remedy: another name, such as 'my_package>{name}'."
            )
        _schedules[name] = schedule
        return schedule

    return add


def serialize(schedule: Schedule) -> dict[str, Any]:
    """The registered name of a schedule, and its get_config(). JSON-able.

    Raises:
      ValueError: its class is not registered.
    """
    for name, registered in _schedules.items():
        if registered is type(schedule):
            return {"name": name, "config": schedule.get_config()}
    raise ValueError(
        f"schedule {schedule!r} cannot be saved, because its class {type(schedule).__qualname__} is not registered. "
        "Remedy: decorate the class with @tf_fusedrec.schedules.register('my_package>my_schedule')."
    )


def deserialize(config: Mapping[str, Any]) -> Schedule:
    """The schedule of a config made by `serialize`.

    Raises:
      ValueError: no class is registered under the name.
    """
    name = config["name"]
    if name not in _schedules:
        raise ValueError(
            f"a saved model has the schedule {name!r}, and registered are {sorted(_schedules)}. Remedy: import the "
            "module that registers it, by @tf_fusedrec.schedules.register, before the model is loaded."
        )
    return _schedules[name](**config["config"])
