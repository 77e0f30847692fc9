"""Converts Keras optimizers to records with equal formulas, and refuses all others by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.optimizers.rules import (
    RULES,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    LearningRate,
    RMSprop,
    Rule,
    is_schedule,
)


def resolve(optimizer: Any) -> Rule:
    """Returns a record unchanged and converts a Keras optimizer by from_keras."""
    return optimizer if isinstance(optimizer, Rule) else from_keras(optimizer)


def from_keras(optimizer: Any) -> Rule:
    """Returns the record with the formulas of a Keras optimizer, also of tf_keras' legacy ones.

    SGD, Adagrad, RMSprop, Adam, AdamW and Ftrl have counterparts. They are equal on rows that every step touches. On
    other rows, Keras' dense step decays momenta, moments and (AdamW) weights. The record's step changes nothing there.

    Raises:
      ValueError: The class or one of its options has no counterpart.
    """
    new = keras.optimizers
    counterparts: dict[type, Callable[[LearningRate, Mapping[str, Any]], Rule]] = {
        new.SGD: _sgd, new.Adam: _adam, new.AdamW: _adam, new.Ftrl: _ftrl,
        new.Adagrad: functools.partial(_adagrad, epsilon_inside=True),
        new.RMSprop: functools.partial(_rmsprop, epsilon_inside=True),
    }  # fmt: skip
    of_legacy = {"SGD": _sgd, "Adam": _adam, "Adagrad": _adagrad, "RMSprop": _rmsprop, "Ftrl": _ftrl}
    counterparts |= {legacy: of_legacy[name] for name, legacy in keras_api.LEGACY_OPTIMIZERS.items()}
    keras_class = type(optimizer)
    if keras_class not in counterparts:  # A subclass may change the formulas, so isinstance does not suffice.
        raise ValueError(
            f"Native tables have no counterpart of optimizer {keras_class.__module__}.{keras_class.__name__}. Use a "
            f"record of tf_fusedrec.optimizers ({', '.join(RULES)}), or FusedEmbedding(backend='tfra')."
        )
    config = optimizer.get_config()
    _check_options(optimizer, config)
    # The schedule object is taken over its config, because a user's schedule need not be registered with Keras.
    rate = optimizer._learning_rate if isinstance(optimizer, new.Optimizer) else optimizer._hyper["learning_rate"]
    return counterparts[keras_class](rate if is_schedule(rate) else float(config["learning_rate"]), config)


def _check_options(optimizer: Any, config: Mapping[str, Any]) -> None:
    """Raises ValueError when the optimizer uses an option that the records lack."""
    name_of_class = type(optimizer).__name__
    record = f"tf_fusedrec.optimizers.{name_of_class}"
    remedies = {
        "clipnorm": f"{record}(clipnorm=...), which clips row by row",
        "global_clipnorm": f"{record}(clipnorm=...), which clips row by row",
        "clipvalue": f"{record}(clipnorm=...)",
        "weight_decay": "tf_fusedrec.optimizers.AdamW",
        "exclude_from_weight_decay": "tf_fusedrec.optimizers.Adam for the excluded tables",
        "decay": "learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)",
        "gradient_accumulation_steps": "FusedEmbedding(accumulate_steps=...)",
        **dict.fromkeys(("amsgrad", "use_ema", "adaptive_epsilon", "centered", "gradient_transformers"), record),
        "loss_scale_factor": record,
    }
    used = {name: config.get(name, getattr(optimizer, name, None)) for name in remedies}
    lists = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_names")
    used["exclude_from_weight_decay"] = [entry for name in lists for entry in getattr(optimizer, name, [])]
    if (names := getattr(optimizer, "_exclude_from_weight_decay_pattern", None)) is not None:  # of Keras 3
        used["exclude_from_weight_decay"].append(names.pattern)
    if name_of_class == "RMSprop":
        used["momentum"], remedies["momentum"] = config["momentum"], record
    if name_of_class in ("Adam", "AdamW"):
        del used["weight_decay"]  # Keras' Adam and AdamW both apply it like the record AdamW.
    numbers = getattr(optimizer, "_hyper", None) or {"learning_rate": optimizer._learning_rate}
    for name, value in numbers.items():
        if callable(value) and not (is_schedule(value) or isinstance(value, tf.Variable)):
            used[name], remedies[name] = value, "a number" + " or a schedule" * (name == "learning_rate")
    for name, value in used.items():
        if value:
            raise ValueError(
                f"Native tables have no counterpart of {name_of_class}.{name}, got {value!r}. Use {remedies[name]}, or "
                "FusedEmbedding(backend='tfra')."
            )


def _sgd(rate: LearningRate, config: Mapping[str, Any]) -> Rule:
    return SGD(rate, momentum=float(config["momentum"]), nesterov=bool(config["nesterov"]))


def _adagrad(rate: LearningRate, config: Mapping[str, Any], epsilon_inside: bool = False) -> Rule:
    return Adagrad(rate, float(config["initial_accumulator_value"]), float(config["epsilon"]), epsilon_inside)


def _rmsprop(rate: LearningRate, config: Mapping[str, Any], epsilon_inside: bool = False) -> Rule:
    return RMSprop(rate, float(config["rho"]), float(config["epsilon"]), epsilon_inside)


def _adam(rate: LearningRate, config: Mapping[str, Any]) -> Rule:
    terms = {name: float(config[name]) for name in ("beta_1", "beta_2", "epsilon")}
    decay = config.get("weight_decay")
    return AdamW(rate, weight_decay=float(decay), **terms) if decay else Adam(rate, **terms)


def _ftrl(rate: LearningRate, config: Mapping[str, Any]) -> Rule:
    return Ftrl(
        rate,
        learning_rate_power=float(config["learning_rate_power"]),
        initial_accumulator_value=float(config["initial_accumulator_value"]),
        l1=float(config["l1_regularization_strength"]),
        l2=float(config["l2_regularization_strength"]),
        l2_shrinkage=float(config["l2_shrinkage_regularization_strength"]),
        beta=float(config["beta"]),
    )
