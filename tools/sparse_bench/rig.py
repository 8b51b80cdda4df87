"""The engine's parts without a scheduler, and lanes that have never read what they hold.

Owns: what is built, as engine/build.py builds it, and the contents of every table. Does not know: time.

Two things differ from a server, both of them said in the output. Host blocks are fewer than the lanes have, so several
blocks of text share one, and the link carries what it would. But each block has digests of its own, as these are what
a step reads of the GPU's memory: if they were shared too, caches would answer half of it. So a set has two tables here:
`host_table` says where digests are, and `sources` where the rest is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import LaneSetup, SparsePolicy, StepPlan
from minserve.kernels.build_digests import empty_digests
from minserve.kernels.fetch_accounts import SETTLED
from minserve.kernels.fetch_blocks import HERE, fetch_blocks
from minserve.kernels.select_blocks import FetchPlan
from minserve.lookahead.background import Background
from minserve.lookahead.layers import LayerGroup
from minserve.lookahead.order import Order
from minserve.lookahead.pipeline import Lookahead
from minserve.memory.host_pool import HostPool, store_block
from minserve.memory.lanes import Lanes
from minserve.memory.pages import KVPages
from minserve.memory.transfer import to_device
from minserve.memory.working_sets import HasHostKV, Memory, WorkingSets
from minserve.models.causal_lm import CausalLM, build_model
from minserve.models.config import ModelConfig
from minserve.models.eagle3 import Eagle3Head
from minserve.protocol import MAX_DRAFT_TOKENS, SamplingParams
from minserve.runner.attention import KVContext
from minserve.runner.decode import Decode
from minserve.runner.graphs import CudaRecorder, DecodeGraphs, graph_sizes
from minserve.runner.runner import DecodeRunner, Runner
from minserve.spec.draft import Drafter, NoDrafter
from minserve.spec.draft_kv import DraftKV
from minserve.weights.loader import init_dummy_weights

from .luck import LuckySampler, dummy_head
from .sizes import Sizes

DRAFT_WINDOW = 2048


class FabricatedSets(WorkingSets):
    """sources: [lanes, max_blocks] int32, each block's host block; host_table: the place of its digests, all of them
    different. shift: [1] int64: by how many blocks each step's background turns the host_table, so that every block has
    another's digests; 0: not at all."""

    def __init__(self, pages: KVPages, host: HasHostKV, lanes: Lanes, num_heads: int, num_slots: int) -> None:
        super().__init__(pages, Memory(host.kv[:1]), lanes, num_heads, num_slots)
        num_layers, num_lanes, kv_heads, max_blocks = self.maps.block_slot.shape
        head_dim, device = self.kv.shape[-1], self.kv.device
        self.host, self.host_scales = host.kv, host.scales
        self.digests = empty_digests((num_layers, num_lanes * max_blocks), kv_heads, head_dim, self.kv.dtype, device)
        for digests in self.digests.extremes:  # those of normal keys, about, so large that a held block has no lead
            extremes = torch.empty(digests.shape, dtype=self.kv.dtype, device=device).normal_(0.0, 0.5)
            extremes[:, :, 0].sub_(1.77).clamp_(max=0.0)
            extremes[:, :, 1].add_(1.77).clamp_(min=0.0)
            digests.copy_(extremes.mul_(32.0))
        self.digests.keys.random_(0, 256)
        self.places = torch.arange(num_lanes * max_blocks, dtype=torch.int32, device=device).view(num_lanes, -1)
        self.sources = torch.randint(len(host.kv), self.places.shape, dtype=torch.int32, device=device)
        self.shift = torch.zeros(1, dtype=torch.int64, device=device)
        layer = torch.arange(num_layers, device=device)[:, None, None]
        self.host_pieces.copy_(self.sources * num_layers + layer)

    def turn(self) -> None:
        """See shift."""
        columns = self.host_table.shape[1]
        source = (torch.arange(columns, device=self.shift.device) + self.shift) % columns
        self.host_table.copy_(self.host_table.index_select(1, source))

    def _set_hosts(self, lanes: torch.Tensor, blocks: torch.Tensor, hosts: torch.Tensor) -> None:
        """hosts: places of digests, which is what plans bring here."""
        self.host_table[lanes, blocks] = hosts.to(torch.int32)


class _Group(LayerGroup):
    """Where it is several layers, host_pieces stand for the sources."""

    _sets: FabricatedSets

    def fetch(
        self, plan: FetchPlan, lanes: torch.Tensor, step: torch.Tensor, page_table: torch.Tensor, copying: Any = HERE
    ) -> Sequence[torch.Tensor]:
        if self.num_layers > 1:
            return super().fetch(plan, lanes, step, page_table, copying)
        sets = self._sets
        host, scales, layer, table = sets.host, sets.host_scales, self.layers.start, sets.sources
        return fetch_blocks(plan, self._maps, lanes, step, host, layer, table, self._kv, page_table, scales, copying)


class _Background(Background):
    _sets: FabricatedSets

    def __init__(self, sets: FabricatedSets, order: Order, max_entries: int, **options: Any) -> None:
        super().__init__(sets, order, max_entries, **options)
        self._groups = [_Group(sets, group.layers, cut=order.on_host) for group in self._groups]

    def run(self, num_entries: int) -> None:
        super().run(num_entries)
        self._sets.turn()


class Base:
    """What all contexts share: the model, a head or none, and the host pool. folder: with a config.json;
    host_dtype: of host blocks; None: as in pages."""

    def __init__(
        self, folder: Path, device: torch.device, *, has_head: bool, host_bytes: int, host_dtype: torch.dtype | None
    ) -> None:
        self.config = ModelConfig.from_folder(folder)
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.model: CausalLM = build_model(self.config)
        self.weights_bytes = init_dummy_weights(self.model, device=device, dtype=self.dtype, seed=0)
        self.head: Eagle3Head | None = None
        if has_head:
            self.head = dummy_head(folder, self.model, device, self.dtype)
            self.weights_bytes += sum(parameter.nbytes for parameter in self.head.parameters())
        self._page = KVPages(self.config, 1, self.dtype, device)
        self.host_dtype = host_dtype or self.dtype
        block_bytes = KVPages.bytes_per_page(self.config, self.host_dtype)
        self.host = HostPool(max(1, host_bytes // block_bytes), self._page, self.host_dtype)
        self._fill_host()
        self.link_bytes_s = self.host.measure_link()

    def _fill_host(self) -> None:
        """Block by block: CUDA copies nothing that lies in two pieces of registered memory."""
        content = torch.empty(self.host.kv.shape[1:], dtype=self.dtype, device=self.device)
        for number in range(len(self.host.kv)):
            store_block(content.normal_(), self.host.kv, self.host.scales, number)

    def move_to(self, pages: KVPages | None) -> None:
        """The host pool's copies are to and from these pages from now on; None: nobody's."""
        self.host._pages = pages or self._page

    def sizes(self, context: int, num_slots: int) -> Sizes:
        draft_bytes = 0
        if self.head is not None:
            draft_bytes = DraftKV(self.head.config, 1, _window(context), self.dtype, "meta").kv.nbytes
        return Sizes(self.config, self.dtype, self.host_dtype, self.weights_bytes, draft_bytes, context, num_slots)


class Rig:
    """Pages, lanes and working sets for so many requests of one length, and a runner on them.

    most_drafts: of a step. page_table: [lanes, K + 3], the lanes' pages, on the host.
    """

    def __init__(self, base: Base, sizes: Sizes, num_lanes: int, most_drafts: int) -> None:
        config, device, dtype, model = base.config, base.device, base.dtype, base.model
        self.base, self.sizes, self.num_lanes = base, sizes, num_lanes
        model.set_max_positions(sizes.context)
        self.pages = KVPages(config, num_lanes * sizes.pages_per_lane, dtype, device)
        for layer in self.pages.kv:
            layer.normal_()
        base.move_to(self.pages)
        self.lanes = Lanes(num_lanes, sizes.num_blocks, config.vocab_size, device)
        self.sets = FabricatedSets(self.pages, base.host, self.lanes, config.num_heads, sizes.num_slots)
        self.sampler = LuckySampler(self.lanes, config.vocab_size)
        self.drafter: Drafter | NoDrafter = NoDrafter()
        if base.head is not None:
            base.head.set_max_positions(sizes.context + 4 * MAX_DRAFT_TOKENS)
            self.drafter = Drafter(base.head, self.lanes, _window(sizes.context))
        context = KVContext(
            self.pages.kv, self.lanes.page_table, model.rope_table, config.rms_norm_eps, config.num_heads
        )
        room = graph_sizes(num_lanes)[-1]
        lookahead = Lookahead(self.sets, recalls=False, max_entries=room, background=_Background)
        steps = Decode(model, context, self.lanes, self.sampler, self.drafter, lookahead)
        decode: DecodeRunner = steps
        if device.type == "cuda":
            decode = DecodeGraphs(
                steps,
                CudaRecorder(),
                CudaRecorder(),
                max_lanes=num_lanes,
                most_drafts=most_drafts,
                vocab_size=config.vocab_size,
                dtype=dtype,
                device=device,
            )
        self.runner = Runner(model, context, self.sampler, steps, decode, self.drafter)
        self.page_table = torch.randperm(self.pages.num_pages).view(num_lanes, -1).tolist()

    @torch.inference_mode()
    def fabricate(self, lengths: list[int], policy: SparsePolicy, *, turns: bool) -> None:
        """Lanes of these lengths, sparse, with their first K blocks in slots. turns: see `FabricatedSets.shift`."""
        _synchronize(self.base.device)
        vocab_size = self.base.config.vocab_size
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        setups = [
            LaneSetup(
                lane=lane,
                params=params,
                token_ids=(),
                num_tokens=length,
                start=0,
                end=self.sizes.context,
                num_prompt_tokens=length,
                end_token_ids=(),
                last_token=lane * 7919 % vocab_size,
                penalized=False,
                constrained=False,
            )
            for lane, length in enumerate(lengths)
        ]
        self.lanes.prepare(StepPlan(step=0, setups=setups))
        own = to_device(range(len(lengths)), torch.int64, self.base.device)
        self.drafter.forget(own.tolist())
        drafts = [torch.randint(vocab_size, own.shape, device=own.device) for _ in range(MAX_DRAFT_TOKENS)]
        self.lanes.set_drafts(own, drafts)
        table = to_device(self.page_table, torch.int32, self.base.device)
        self.lanes.page_table[:, : self.sizes.pages_per_lane] = table
        self._fill_sets(own, lengths, policy)
        # Odd, as the number of columns is a multiple of 4: so a block meets all of the lane's digests before any again.
        self.sets.shift.fill_(self.sets.host_table.shape[1] * 2 // 5 | 1 if turns else 0)
        _synchronize(self.base.device)

    def _fill_sets(self, own: torch.Tensor, lengths: list[int], policy: SparsePolicy) -> None:
        sets, num_slots = self.sets, self.sizes.num_slots
        starts = [(length - 1) // BLOCK_SIZE - 1 for length in lengths]
        assert min(starts) >= num_slots, f"{min(lengths)} tokens do not fill {num_slots} slots"
        slots = torch.arange(num_slots, dtype=torch.int32, device=own.device)
        sets.maps.slot_block.copy_(slots.expand_as(sets.maps.slot_block))
        sets.maps.slot_used.zero_()
        sets.maps.block_slot.fill_(-1)
        sets.maps.block_slot[..., :num_slots] = slots
        sets.host_table.copy_(sets.places)
        sets.sparse.zero_()
        sets.sparse[own] = True
        sets.ring_start[own] = to_device(starts, torch.int64, own.device)
        sets.looks_ahead.fill_(policy.looks_ahead)
        sets.num_verified.fill_(policy.num_verified)
        sets.cap.fill_(policy.cap)
        sets.retry_above.fill_(torch.inf if policy.retry_above is None else policy.retry_above)
        sets.since_retry.fill_(SETTLED)
        for table in (sets.allowance, sets.refills, sets.late, sets.by_layer):
            table.zero_()
        sets.step.fill_(1)


def _window(context: int) -> int:
    return max(64, min(DRAFT_WINDOW, context) // BLOCK_SIZE * BLOCK_SIZE)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
