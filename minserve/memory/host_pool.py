"""The host tier's memory: whole blocks, all layers and KV heads of one side by side.

Owns: the tensor, and how one block moves between it and the pages. Does not know whose block it is.
"""

from minserve.memory.copies import Copy
from minserve.memory.pages import KVPages, zeros


class HostPool:
    """kv: [host blocks, layers, kv_heads, 2 (K, V), 16, head_dim], in the dtype of the pages."""

    def __init__(self, num_blocks: int, pages: KVPages) -> None:
        num_layers, _, *rest = pages.kv.shape
        self._pages = pages
        self.kv = zeros((num_blocks, num_layers, *rest), pages.kv.dtype, "cpu")

    def move(self, copy: Copy) -> None:
        """Copy one block's data, now."""
        page, host = self._pages.kv[:, copy.page], self.kv[copy.host]
        if copy.kind == "store":
            host.copy_(page)
        else:
            page.copy_(host)
