"""Whose configuration a `config.json` is, so that another model's is refused in one line."""

from typing import Any


class Fields(dict[str, Any]):
    """A configuration file's fields; a size that the model needs and the file lacks is named.

    Args:
      config: as read from the file.
      model: the name of the model in messages.
      class_names: what `_class_name` may be, where it stands there.
      features: fields of the architecture that are not ported, and the value without the feature.

    Raises:
      ValueError: another `_class_name`.
      NotImplementedError: a feature that is not ported.
    """

    def __init__(
        self,
        config: dict[str, Any],
        model: str,
        class_names: tuple[str, ...],
        features: dict[str, Any],
    ):
        super().__init__(config)
        self.model = model
        kind = config.get("_class_name")
        if kind is not None and kind not in class_names:
            raise ValueError(
                f"_class_name: expected {' or '.join(class_names)} of {model}, got {kind!r}"
            )
        for name, plain in features.items():
            if config.get(name) not in (None, plain):
                raise NotImplementedError(
                    f"{name}: {config[name]!r} is not supported by {model} here"
                )

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{name}: missing; this is no configuration of {self.model}")

    def three(self, name: str, default: tuple[int, int, int] | None = None) -> tuple[Any, Any, Any]:
        """A field of three numbers, for (t, h, w).

        Raises:
          ValueError: something else.
        """
        value = self[name] if default is None else self.get(name, default)
        if not isinstance(value, (list, tuple)) or len(value) != 3:
            raise ValueError(
                f"{name}: expected three numbers in a configuration of {self.model}, got {value!r}"
            )
        first, second, third = value
        return first, second, third
