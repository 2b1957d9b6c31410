"""Public pytrees in exported functions: the names under which `Exported.serialize` keeps them."""

import jax.export

from ._order import AttentionState
from ._prepare import Prepared4, Restored
from ._quantize import Nvfp4, Quantized
from ._vsmooth import Clusters
from .pallas_kernels.layout import Prepared8


def _name(kind: type) -> str:
    return f"vc_jax.{kind.__name__}"


for kind in (AttentionState, Clusters, Nvfp4, Prepared4, Quantized, Restored):
    jax.export.register_namedtuple_serialization(kind, serialized_name=_name(kind))

jax.export.register_pytree_node_serialization(
    Prepared8,
    serialized_name=_name(Prepared8),
    serialize_auxdata=lambda auxdata: b"",  # All of its fields are arrays.
    deserialize_auxdata=lambda data: (),
)
