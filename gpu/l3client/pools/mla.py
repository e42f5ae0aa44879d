"""The pool of a model with one latent row for each token: MLA."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from l3client.pools.base import KVPool


class MLAPool(KVPool):
    """One contiguous ``[slots, dim]`` tensor a layer; seen as one component with one head."""

    def __init__(self, latent: Sequence[Tensor], *, page_size: int) -> None:
        """Raises ValueError that names the tensor, what is wrong with it and what to do."""
        for layer, tensor in enumerate(latent):
            if tensor.ndim != 2:
                raise ValueError(
                    f"latent[{layer}] has shape {tuple(tensor.shape)}: it needs [slots, dim]; "
                    "squeeze the head axis of an engine that keeps one"
                )
        super().__init__({"latent": [tensor.unsqueeze(1) for tensor in latent]}, page_size=page_size)
