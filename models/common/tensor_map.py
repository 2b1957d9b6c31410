"""Checkpoint layouts: which tensors of a file each parameter of a model is made of.

Both directions are pure re-orderings, so that a round trip is exact. Matrices are [out, in] in
the files and [in, ...] in the models; what else differs is said where it is declared.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter (of one layer, if stacked) and the tensors that it is made of.

    Attributes:
      parameter: dotted name in the model.
      names: tensor names; `{}` stands for the layer of a stacked parameter.
      shapes: their shapes.
      load: tensors to parameter.
      save: parameter to tensors.
      layers: length of the leading layer axis, or None.
      stacked: the axis of the parameter along which each tensor is one entry, in order, and `load`
        takes any of them alone; None where it needs all.
    """

    parameter: str
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    load: Callable[..., np.ndarray]
    save: Callable[[np.ndarray], Sequence[np.ndarray]]
    layers: int | None = None
    stacked: int | None = None

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        for layer in range(self.layers or 1):
            for name, shape in zip(self.names, self.shapes, strict=True):
                yield name.format(layer), shape


class TensorMap:
    """The entries of a checkpoint layout, declared with the methods below.

    `ignore` holds endings of tensor names that a file may have and the model does not need.
    """

    def __init__(self, ignore: Sequence[str] = ()):
        self.entries: list[Entry] = []
        self.ignore = tuple(ignore)
        self._prefix = ("", "")
        self._layers: int | None = None

    def scope(self, parameter: str, name: str, layers: int | None = None) -> "TensorMap":
        """A view with prefixes on both sides, adding to the same entries."""
        view = TensorMap(self.ignore)
        view.entries = self.entries
        view._prefix = (self._prefix[0] + parameter, self._prefix[1] + name)
        view._layers = layers if layers is not None else self._layers
        return view

    def add(
        self,
        parameter: str,
        names: Sequence[str],
        shapes: Sequence[Shape],
        load: Callable[..., np.ndarray],
        save: Callable[[np.ndarray], Sequence[np.ndarray]],
        stacked: int | None = None,
    ) -> None:
        self.entries.append(
            Entry(
                self._prefix[0] + parameter,
                tuple(self._prefix[1] + name for name in names),
                tuple(shapes),
                load,
                save,
                self._layers,
                stacked,
            )
        )

    def reshaped(self, parameter: str, name: str, file: Shape, model: Shape | None = None) -> None:
        """The same elements in the same order, in the shape `model` (default: `file`)."""
        model = file if model is None else model
        self.add(parameter, [name], [file], lambda x: x.reshape(model), lambda p: [p.reshape(file)])

    def linear(
        self,
        parameter: str,
        name: str,
        features: tuple[int, int],
        *,
        bias: bool = True,
        kernel: Shape | None = None,
        swap_halves: bool = False,
    ) -> None:
        """A dense layer (in, out); `kernel` is the file's shape where it is a convolution's.

        `swap_halves` exchanges the two halves of the outputs (scale and shift, say).
        """
        inputs, outputs = features
        file = kernel or (outputs, inputs)
        swap = _swap_halves if swap_halves else lambda x: x
        self.add(
            f"{parameter}.kernel",
            [f"{name}.weight"],
            [file],
            lambda x: swap(x.reshape(outputs, inputs)).T,
            lambda p: [swap(p.T).reshape(file)],
        )
        if bias:
            self.add(f"{parameter}.bias", [f"{name}.bias"], [(outputs,)], swap, lambda p: [swap(p)])

    def heads_in(
        self,
        parameter: str,
        names: str | Sequence[str],
        features: int,
        heads: int,
        head_dim: int,
        *,
        bias: bool = True,
        count: int | None = None,
        interleaved: bool = False,
    ) -> None:
        """Projections to heads, kernel [D, count, N, H].

        `names` is a sequence of `count` separate layers, or one fused layer whose rows are ordered
        [count, N, H], or [N, count, H] if `interleaved`.
        """
        fused = isinstance(names, str)
        count = count if fused else len(names)
        assert count is not None
        names = [names] if fused else list(names)
        rows = count * heads * head_dim // len(names)

        def load(*tensors: np.ndarray) -> np.ndarray:
            tail = tensors[0].shape[1:]
            x = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
            if interleaved:
                return x.reshape(heads, count, head_dim, *tail).swapaxes(0, 1)
            return x.reshape(-1, heads, head_dim, *tail)

        def save(x: np.ndarray) -> Sequence[np.ndarray]:
            tail = x.shape[3:]
            if interleaved:
                x = x.swapaxes(0, 1)
            x = x.reshape(len(names), rows, *tail)
            return list(x)

        self.add(
            f"{parameter}.kernel",
            [f"{name}.weight" for name in names],
            [(rows, features)] * len(names),
            lambda *tensors: np.moveaxis(load(*tensors), -1, 0),
            lambda p: save(np.moveaxis(p, 0, -1)),
            None if fused else 1,
        )
        if bias:
            bias_names = [f"{name}.bias" for name in names]
            shapes = [(rows,)] * len(names)
            self.add(f"{parameter}.bias", bias_names, shapes, load, save, None if fused else 0)

    def heads_out(
        self,
        parameter: str,
        name: str,
        heads: int,
        head_dim: int,
        features: int,
        *,
        bias: bool = True,
    ) -> None:
        """The projection from heads, kernel [N, H, D]."""
        file, model = (features, heads * head_dim), (heads, head_dim, features)
        self.add(
            f"{parameter}.kernel",
            [f"{name}.weight"],
            [file],
            lambda x: x.T.reshape(model),
            lambda p: [p.reshape(-1, features).T],
        )
        if bias:
            self.reshaped(f"{parameter}.bias", f"{name}.bias", (features,))

    def gate_value(
        self, parameter: str, names: Sequence[str], features: int, hidden: int, *, gate_first: bool
    ) -> None:
        """The fused inputs of a SwiGLU, kernel [D, 2, hidden] with the gate first.

        `names` are two separate layers, or one whose rows are two halves; `gate_first` says in
        which order they come.
        """
        rows = 2 * hidden // len(names)

        def load(*tensors: np.ndarray) -> np.ndarray:
            x = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
            x = x.reshape(-1, hidden, features)
            return np.moveaxis(x if gate_first else x[::-1], -1, 0)

        def save(p: np.ndarray) -> Sequence[np.ndarray]:
            x = np.moveaxis(p, 0, -1)
            x = x if gate_first else x[::-1]
            return list(x.reshape(len(names), rows, features))

        shapes = [(rows, features)] * len(names)
        stacked = 1 if len(names) == 2 and gate_first else None
        self.add(parameter, [f"{name}.weight" for name in names], shapes, load, save, stacked)

    def layer_norm(self, parameter: str, name: str, features: int) -> None:
        self.reshaped(f"{parameter}.scale", f"{name}.weight", (features,))
        self.reshaped(f"{parameter}.bias", f"{name}.bias", (features,))

    def mlp(self, parameter: str, names: tuple[str, str], widths: tuple[int, int, int]) -> None:
        self.linear(f"{parameter}.fc_in", names[0], widths[:2])
        self.linear(f"{parameter}.fc_out", names[1], widths[1:])


def _swap_halves(x: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2)
    return np.concatenate([second, first])
