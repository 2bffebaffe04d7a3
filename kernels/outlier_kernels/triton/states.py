"""The statistics of a trace from one read of each hidden state, and a report from which the host learns the hits.

There is one kernel per state: programs store results of their tiles, the last program of a strip of features and that
of a block of tokens sum them up, and the last of all adds them to the statistics. Nothing waits for the device until a
report is read. A median is selected by histograms of the magnitudes' bits, whose order is that of the magnitudes.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from outlier_kernels.states import HIT, Found, NotFinite, State, serves
from outlier_kernels.triton import launch, room

__all__ = ["add", "add_residual", "serves"]
TILE = {"TOKENS": 8, "FEATURES": 128, "STEPS": 4, "num_warps": 8}
NOTHING, MAGNITUDES, HITS = range(3)  # the record of each entry
MOST = 1 << 9  # states in a report
LEAST_ROOM = 1 << 20  # least number of hits that a report has room for
SUMS = tl.constexpr(10)  # per block: four power sums of all tokens and of the rest, and their kurtoses
BINS = tl.constexpr(1 << 16)
FAR = tl.constexpr(2**31 - 1)  # larger than every place
# The number of float32's bits that a bin drops, and the first nonzero bin minus one: 16-bit numbers
# have a bin each, 32-bit numbers need a second histogram.
BITS = {torch.float32: (15, 0), torch.bfloat16: (16, 0), torch.float16: (13, (103 << 10) - 1)}


class Report:
    """The report of the kernels on the states of a device, in the device's memory.

    table: int32; the number of hits listed so far; the same number after each state; and each state's first feature
    that is not finite, or -1. listed: the hits, as features and values.
    """

    def __init__(self, device: torch.device):
        self.device, self.table = device, torch.zeros(1 + 2 * MOST, dtype=torch.int32, device=device)
        self.labels: list[object] = []
        self.listed, self.expected = None, 0  # `expected`: upper bound of the listed hits

    def begin(self, found: Found, label: object, entries: int) -> None:
        """Reserve an entry of the report for one more state. entries: of the state if its hits are listed, otherwise
        0."""
        if len(self.labels) == MOST or (self.listed is not None and self.expected + entries > len(self.listed)):
            self.read(found)
        if entries and (self.listed is None or len(self.listed) < entries):
            free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
            size = max(LEAST_ROOM, entries, free // (16 * HIT.itemsize))
            self.listed = torch.empty(size, 2, dtype=torch.int32, device=self.device)
        self.labels.append(label)
        self.expected += entries

    def read(self, found: Found) -> None:
        """Wait for all states and append their hits to `found`.

        Raises:
            NotFinite: one of the states holds NaN or inf.
        """
        if not self.labels:
            return
        count, *ends = self.table.tolist()
        for label, feature in zip(self.labels, ends[MOST:], strict=False):
            if feature >= 0:
                raise NotFinite(feature, label)
        if count:
            hits = self.listed[:count].cpu().numpy().view(HIT)[:, 0].copy()  # the interpreter reuses the list
            for label, of_state in zip(self.labels, np.split(hits, ends[: len(self.labels)]), strict=False):
                found.append(label, of_state)
            self.table[:1].zero_()
        self.labels, self.expected = [], 0


def _report(state: State, listed: bool) -> Report:
    device, reports = state.x.device, state.found.reports
    report = reports.get(device) or reports.setdefault(device, Report(device))
    report.begin(state.found, state.label, state.x.numel() if listed else 0)
    return report


def add(state: State, alpha: float, listed: bool = True) -> torch.Tensor:
    """See `dispatch.add_state`."""
    report, x = _report(state, listed), state.x
    tokens, features = x.shape
    blocks = triton.cdiv(tokens, TILE["TOKENS"] * TILE["STEPS"])
    strips, hits = triton.cdiv(features, TILE["FEATURES"]), x.new_empty(features, dtype=torch.int64)
    spaces = room(_spaces, x.device, triton.next_power_of_2(blocks), strips)
    launch(
        *(add_tile, (strips, blocks), x, state.ids, _bytes(state.kept), tuple(state.statistics.values()), hits, spaces),
        *(report.table, report.listed if listed else None, len(report.labels) - 1),
        *((tokens, features, *x.stride()), float(alpha)),
        KEEPS=_record_kind(state.kept),
        STATES=MOST,
        **TILE,
    )
    return hits


def _record_kind(kept: torch.Tensor | None) -> int:
    return NOTHING if kept is None else HITS if kept.dtype == torch.bool else MAGNITUDES


def _bytes(kept: torch.Tensor | None) -> torch.Tensor | None:
    """Return the record of each entry, flags as int8."""
    return kept.view(torch.int8) if _record_kind(kept) == HITS else kept


def _spaces(device: torch.device, blocks: int, strips: int) -> tuple[torch.Tensor, ...]:
    """Make scratch memory for the programs' results in float32, float64 and int32; and tickets, which the last program
    of a launch restores to 0."""
    features, tokens = strips * TILE["FEATURES"], blocks * TILE["TOKENS"] * TILE["STEPS"]
    return (
        torch.empty(2 * blocks * (features + strips), device=device),
        torch.empty(2 * blocks * features + 4 * strips * tokens + 10 * blocks, dtype=torch.float64, device=device),
        torch.empty(blocks * (features + 3 * strips), dtype=torch.int32, device=device),
        torch.zeros(1 + strips + blocks, dtype=torch.int32, device=device),
    )


def add_residual(state: State, limits: tuple[float, float], massive: torch.Tensor) -> None:
    """See `dispatch.add_residual`."""
    report, x, statistics = _report(state, False), state.x, state.statistics
    tokens, features = x.shape
    grid = triton.cdiv(features, TILE["FEATURES"]), triton.cdiv(tokens, TILE["TOKENS"] * TILE["STEPS"])
    floats, _, wholes, tickets = room(_spaces, x.device, triton.next_power_of_2(grid[1]), grid[0])
    bins, median = room(_bins, x.device)
    shift, offset = BITS[x.dtype]
    sums, sizes = (statistics["sum_of_max"], statistics["sum_of_ratios"]), (tokens, features, *x.stride())
    launch(
        *(find_median, grid, x, state.ids, state.kept, statistics["largest"], sums),
        (floats, wholes, tickets, bins, median),
        *(report.table, len(report.labels) - 1, sizes),
        KEEPS=_record_kind(state.kept),
        STATES=MOST,
        SHIFT=shift,
        OFFSET=offset,
        **TILE,
    )
    if x.dtype == torch.float32:
        launch(find_median_bits, grid, x, sums, (tickets, bins, median), sizes, SHIFT=shift, **TILE)
    launch(find_massive, grid, x, statistics["massive"], massive, median, sizes, *map(float, limits), **TILE)


def _bins(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a histogram, which the last program of a launch leaves empty; and room for the median's bin, its rank there,
    its bits, and those of the largest magnitude."""
    return torch.zeros(BINS.value, dtype=torch.int32, device=device), torch.empty(4, dtype=torch.int32, device=device)


@triton.jit
def add_tile(
    x,
    ids,
    kept,
    statistics,
    hits,
    spaces,
    table,
    listed,
    state,
    sizes,
    alpha,
    KEEPS: tl.constexpr,
    STATES: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEPS: tl.constexpr,
):
    lows, highs, largest, rest_largest, all_hits, sequences = statistics[:6]
    all_sums, all_squares, rest_squares, of_tensor, of_token = statistics[6:]
    floats, doubles, wholes, tickets = spaces
    tokens, features, _, feature_stride = sizes
    strip, block, strips, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    feature = strip * FEATURES + tl.arange(0, FEATURES)
    of_feature, others = feature < features, blocks.to(tl.int64) * features
    powers, of_blocks = doubles + 2 * others, doubles + 2 * others + 4 * strips.to(tl.int64) * tokens
    rests, entries, programs = floats + 2 * others, wholes + others, strips * blocks
    least, most = tl.full((FEATURES,), float("inf"), tl.float32), tl.full((FEATURES,), float("-inf"), tl.float32)
    of_most, count = tl.zeros((FEATURES,), tl.int32), tl.zeros((FEATURES,), tl.int32)
    sums, squares = tl.zeros((FEATURES,), tl.float64), tl.zeros((FEATURES,), tl.float64)
    strongest, rest = tl.full((FEATURES,), -1.0, tl.float32), tl.zeros((FEATURES,), tl.float32)
    for step in range(STEPS):
        token = (block * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
        value, inside, entry = tile_of(x, token, feature, sizes)
        magnitude = tl.abs(value)
        hit = magnitude >= alpha  # never true for the zeros outside
        if KEEPS == 1:
            keep_largest(kept + entry, magnitude, inside)
        if KEEPS == 2:
            tl.store(kept + entry, hit.to(tl.int8), mask=hit)
        of_step = tl.sum(hit.to(tl.int32), axis=0)
        if listed is not None:
            list_hits(table, listed, hit, tl.sum(of_step), value, feature)
        least = tl.minimum(least, tl.min(tl.where(inside, value, float("inf")), axis=0))
        most = tl.maximum(most, tl.max(tl.where(inside, value, float("-inf")), axis=0))
        strongest, of_most = update_strongest(strongest, of_most, magnitude, token)
        rest = tl.maximum(rest, tl.max(tl.where((token > 0)[:, None], magnitude, 0.0), axis=0))
        first = value.to(tl.float64)
        second = first * first
        count, sums, squares = count + of_step, sums + tl.sum(first, axis=0), squares + tl.sum(second, axis=0)
        place = powers + strip.to(tl.int64) * 4 * tokens + token
        tl.store(place, tl.sum(first, axis=1), mask=token < tokens)
        tl.store(place + tokens, tl.sum(second, axis=1), mask=token < tokens)
        tl.store(place + 2 * tokens, tl.sum(second * first, axis=1), mask=token < tokens)
        tl.store(place + 3 * tokens, tl.sum(second * second, axis=1), mask=token < tokens)
    place = block.to(tl.int64) * features + feature
    tl.store(floats + place, least, mask=of_feature)
    tl.store(floats + others + place, most, mask=of_feature)
    tl.store(wholes + place, count, mask=of_feature)
    tl.store(doubles + place, sums, mask=of_feature)
    tl.store(doubles + others + place, squares, mask=of_feature)
    program = block * strips + strip
    tl.store(rests + program, tl.max(rest))
    leave_entry(rests + programs, entries, program, programs, strongest, of_most, feature, squares * 0 != 0)
    tl.debug_barrier()

    if tl.atomic_add(tickets + 1 + strip, 1, sem="acq_rel") == blocks - 1:  # last of its strip
        tl.store(tickets + 1 + strip, 0)
        count, sums, squares = tl.zeros_like(count), tl.zeros_like(sums), tl.zeros_like(squares)
        for start in range(0, blocks, 8):
            parts = start + tl.arange(0, 8)
            within = (parts < blocks)[:, None] & of_feature[None, :]
            places = parts[:, None].to(tl.int64) * features + feature[None, :]
            least = tl.minimum(least, tl.min(load_stored(floats, places, within, float("inf")), axis=0))
            most = tl.maximum(most, tl.max(load_stored(floats + others, places, within, float("-inf")), axis=0))
            count += tl.sum(load_stored(wholes, places, within, 0), axis=0)
            sums += tl.sum(load_stored(doubles, places, within, 0.0), axis=0)
            squares += tl.sum(load_stored(doubles + others, places, within, 0.0), axis=0)
        first = tl.load(x + feature.to(tl.int64) * feature_stride, mask=of_feature, other=0).to(tl.float32)
        first = first.to(tl.float64)
        tl.store(lows + feature, tl.minimum(tl.load(lows + feature, mask=of_feature), least), mask=of_feature)
        tl.store(highs + feature, tl.maximum(tl.load(highs + feature, mask=of_feature), most), mask=of_feature)
        tl.store(hits + feature, count.to(tl.int64), mask=of_feature)
        increase(all_hits + feature, count, of_feature)
        increase(sequences + feature, (count > 0).to(tl.int32), of_feature)
        increase(all_sums + feature, sums, of_feature)
        increase(all_squares + feature, squares, of_feature)
        increase(rest_squares + feature, squares - first * first, of_feature)
    if tl.atomic_add(tickets + 1 + strips + block, 1, sem="acq_rel") == strips - 1:  # last of its block of tokens
        tl.store(tickets + 1 + strips + block, 0)
        leave_kurtoses(of_blocks, powers, block, blocks, strips, tokens, features, TOKENS * STEPS)
    tl.debug_barrier()

    if tl.atomic_add(tickets, 1, sem="acq_rel") == programs - 1:  # last of all
        tl.store(tickets, 0)
        join_entry(largest, rests + programs, entries, programs, x, ids, sizes, table, state, STATES)
        of_programs = tl.zeros((1024,), tl.float32)
        for start in range(0, programs, 1024):
            part = start + tl.arange(0, 1024)
            of_programs = tl.maximum(of_programs, load_stored(rests, part, part < programs, 0.0))
        tl.store(rest_largest, tl.maximum(tl.load(rest_largest), tl.max(of_programs)))
        join_kurtoses(of_tensor, of_token, of_blocks, blocks, tokens, features)


@triton.jit
def find_median(
    x,
    ids,
    kept,
    largest,
    sums,
    spaces,
    table,
    state,
    sizes,
    KEEPS: tl.constexpr,
    STATES: tl.constexpr,
    SHIFT: tl.constexpr,
    OFFSET: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Count the magnitudes in the bins of a histogram of their upper bits, and find the bin that holds the median; it
    determines the median in 16 bits, `find_median_bits` finds the rest in 32. Keep and report the largest magnitude."""
    floats, wholes, tickets, bins, median = spaces
    tokens, features, _, _ = sizes
    strip, block, strips, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    programs *= strips
    feature = strip * FEATURES + tl.arange(0, FEATURES)
    strongest, of_most = tl.full((FEATURES,), -1.0, tl.float32), tl.zeros((FEATURES,), tl.int32)
    bad = tl.zeros((FEATURES,), tl.int32)
    for step in range(STEPS):
        token = (block * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
        value, inside, entry = tile_of(x, token, feature, sizes)
        magnitude = tl.abs(value)
        if KEEPS == 1:
            keep_largest(kept + entry, magnitude, inside)
        strongest, of_most = update_strongest(strongest, of_most, magnitude, token)
        bad = tl.maximum(bad, tl.max((value * 0 != 0).to(tl.int32), axis=0))
        number = (magnitude.to(tl.int32, bitcast=True) >> SHIFT) - OFFSET
        tl.atomic_add(bins + tl.minimum(tl.maximum(number, 0), BINS - 1), 1, mask=inside, sem="relaxed")
    leave_entry(floats, wholes, strip + block * strips, programs, strongest, of_most, feature, bad > 0)
    tl.debug_barrier()
    if tl.atomic_add(tickets, 1, sem="acq_rel") == programs - 1:
        tl.store(tickets, 0)
        most = join_entry(largest, floats, wholes, programs, x, ids, sizes, table, state, STATES)
        most = most.to(tl.int32, bitcast=True)
        rank = ((tokens.to(tl.int64) * features - 1) // 2).to(tl.int32)
        chosen, before = select(bins, rank)
        if SHIFT == 15:
            tl.store(median, chosen)
            tl.store(median + 1, rank - before)
            tl.store(median + 3, most)
        else:
            leave_median(median, tl.where(chosen == 0, 0, (chosen + OFFSET) << SHIFT), most, sums)


@triton.jit
def find_median_bits(
    x, sums, spaces, sizes, SHIFT: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr, STEPS: tl.constexpr
):
    """Find the lower bits of the median by a second histogram, of the magnitudes in its bin."""
    tickets, bins, median = spaces
    chosen, feature = tl.load(median), tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    for step in range(STEPS):
        token = (tl.program_id(1) * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
        value, inside, _ = tile_of(x, token, feature, sizes)
        bits = tl.abs(value).to(tl.int32, bitcast=True)
        inside &= bits >> SHIFT == chosen
        tl.atomic_add(bins + (bits & ((1 << SHIFT) - 1)), 1, mask=inside, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(tickets, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(tickets, 0)
        rest, _ = select(bins, tl.load(median + 1))
        leave_median(median, (chosen << SHIFT) + rest, tl.load(median + 3), sums)


@triton.jit
def find_massive(
    x,
    massive,
    at_position,
    median,
    sizes,
    above,
    ratio,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Count the massive activations, by feature and by position, once the median is known."""
    middle = tl.load(median + 2).to(tl.float32, bitcast=True)
    most = tl.load(median + 3).to(tl.float32, bitcast=True)
    if most > above:
        feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
        count = tl.zeros((FEATURES,), tl.int64)
        for step in range(STEPS):
            token = (tl.program_id(1) * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
            value, _, _ = tile_of(x, token, feature, sizes)
            found = ((tl.abs(value) > above) & (tl.abs(value) >= ratio * middle)).to(tl.int64)
            count, of_token = count + tl.sum(found, axis=0), tl.sum(found, axis=1)
            tl.atomic_add(at_position + token, of_token, mask=of_token > 0, sem="relaxed")
        tl.atomic_add(massive + feature, count, mask=count > 0, sem="relaxed")


@triton.jit
def tile_of(x, token, feature, sizes):
    """Load entries of some tokens and features in float32, 0 outside; return them, which are inside, and their
    numbers."""
    tokens, features, token_stride, feature_stride = sizes
    token, feature = token[:, None].to(tl.int64), feature[None, :].to(tl.int64)
    inside = (token < tokens) & (feature < features)
    value = tl.load(x + token * token_stride + feature * feature_stride, mask=inside, other=0).to(tl.float32)
    return value, inside, token * features + feature


@triton.jit
def keep_largest(kept, magnitude, inside):
    before = tl.load(kept, mask=inside, other=0).to(tl.float32)
    tl.store(kept, tl.maximum(before, magnitude).to(kept.dtype.element_ty), mask=inside)


@triton.jit
def list_hits(table, listed, hit, count, value, feature):
    if count > 0:
        flag = hit.to(tl.int32)
        of_token = tl.sum(flag, axis=1)
        place = tl.cumsum(flag, axis=1) - 1 + (tl.cumsum(of_token, axis=0) - of_token)[:, None]
        address = listed + 2 * (tl.atomic_add(table, count, sem="relaxed").to(tl.int64) + place)
        tl.store(address, tl.zeros_like(flag) + feature[None, :], mask=hit)
        tl.store(address + 1, value.to(tl.int32, bitcast=True), mask=hit)


@triton.jit
def update_strongest(strongest, of_most, magnitude, token):
    """Return the largest magnitude of each feature, and the first token that has it, after more tokens."""
    most = tl.max(magnitude, axis=0)
    first = tl.min(tl.where(magnitude == most[None, :], token[:, None], FAR), axis=0)
    return tl.maximum(strongest, most), tl.where(most > strongest, first, of_most)


@triton.jit
def leave_entry(largest, entries, program, programs, strongest, of_most, feature, bad):
    """Store the largest magnitude of a program, its first feature and that feature's first token; and the first feature
    with a number that is not finite."""
    most = tl.max(strongest)
    first = tl.min(tl.where(strongest == most, feature, FAR))
    tl.store(largest + program, most)
    tl.store(entries + program, first)
    tl.store(entries + programs + program, tl.min(tl.where(feature == first, of_most, FAR)))
    tl.store(entries + 2 * programs + program, tl.min(tl.where(bad, feature, FAR)))


@triton.jit
def load_stored(address, place, mask, other):
    """Load numbers that other programs stored, bypassing the first-level cache."""
    return tl.load(address + place, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def increase(address, value, mask):
    tl.store(address, tl.load(address, mask=mask, other=0) + value, mask=mask)


@triton.jit
def join_entry(largest, strongest, entries, programs, x, ids, sizes, table, state, STATES: tl.constexpr):
    """Replace the largest entry so far by that of a state, if its numbers are lexicographically larger; write the
    state's report, and return the magnitude."""
    most, first = tl.full((1024,), -1.0, tl.float32), tl.full((1024,), FAR, tl.int32)
    bad, earliest = first, first
    for start in range(0, programs, 1024):
        part = start + tl.arange(0, 1024)
        most = tl.maximum(most, load_stored(strongest, part, part < programs, -1.0))
        bad = tl.minimum(bad, load_stored(entries + 2 * programs, part, part < programs, FAR))
    magnitude, broken = tl.max(most), tl.min(bad)
    for start in range(0, programs, 1024):
        part = start + tl.arange(0, 1024)
        alike = load_stored(strongest, part, part < programs, -1.0) == magnitude
        first = tl.minimum(first, load_stored(entries, part, (part < programs) & alike, FAR))
    feature = tl.min(first)
    for start in range(0, programs, 1024):
        part = start + tl.arange(0, 1024)
        alike = load_stored(strongest, part, part < programs, -1.0) == magnitude
        alike &= load_stored(entries, part, part < programs, FAR) == feature
        earliest = tl.minimum(earliest, load_stored(entries + programs, part, (part < programs) & alike, FAR))
    position, finite = tl.min(earliest), broken == FAR
    value = tl.load(x + position.to(tl.int64) * sizes[2] + feature.to(tl.int64) * sizes[3], mask=finite)
    value, token = value.to(tl.float32), tl.load(ids + position, mask=finite)
    later = token > tl.load(largest + 4)
    later = (position > tl.load(largest + 3)) | ((position == tl.load(largest + 3)) & later)
    later = (feature > tl.load(largest + 2)) | ((feature == tl.load(largest + 2)) & later)
    later = (value > tl.load(largest + 1)) | ((value == tl.load(largest + 1)) & later)
    later = (magnitude > tl.load(largest)) | ((magnitude == tl.load(largest)) & later)
    later &= finite
    tl.store(largest, magnitude.to(tl.float64), mask=later)
    tl.store(largest + 1, value.to(tl.float64), mask=later)
    tl.store(largest + 2, feature.to(tl.float64), mask=later)
    tl.store(largest + 3, position.to(tl.float64), mask=later)
    tl.store(largest + 4, token.to(tl.float64), mask=later)
    tl.store(table + 1 + state, tl.load(table, cache_modifier=".cg"))
    tl.store(table + 1 + STATES + state, tl.where(finite, -1, broken))
    return magnitude


@triton.jit
def leave_kurtoses(of_blocks, powers, block, blocks, strips, tokens, features, TOKENS: tl.constexpr):
    """Store the summed powers of a block's tokens and their kurtoses, for all positions and without position 0."""
    token = block * TOKENS + tl.arange(0, TOKENS)
    first, second = tl.zeros((TOKENS,), tl.float64), tl.zeros((TOKENS,), tl.float64)
    third, fourth = tl.zeros((TOKENS,), tl.float64), tl.zeros((TOKENS,), tl.float64)
    for start in range(0, strips, 16):
        part = start + tl.arange(0, 16)
        within = (part < strips)[:, None] & (token < tokens)[None, :]
        place = part[:, None].to(tl.int64) * 4 * tokens + token[None, :]
        first += tl.sum(load_stored(powers, place, within, 0.0), axis=0)
        second += tl.sum(load_stored(powers + tokens, place, within, 0.0), axis=0)
        third += tl.sum(load_stored(powers + 2 * tokens, place, within, 0.0), axis=0)
        fourth += tl.sum(load_stored(powers + 3 * tokens, place, within, 0.0), axis=0)
    found = kurtosis(first / features, second / features, third / features, fourth / features)
    found, of_blocks = tl.where(token < tokens, found, 0.0), of_blocks + block
    for rest in range(2):
        counts = token >= rest
        tl.store(of_blocks + 4 * rest * blocks, tl.sum(tl.where(counts, first, 0.0)))
        tl.store(of_blocks + (4 * rest + 1) * blocks, tl.sum(tl.where(counts, second, 0.0)))
        tl.store(of_blocks + (4 * rest + 2) * blocks, tl.sum(tl.where(counts, third, 0.0)))
        tl.store(of_blocks + (4 * rest + 3) * blocks, tl.sum(tl.where(counts, fourth, 0.0)))
        tl.store(of_blocks + (8 + rest) * blocks, tl.sum(tl.where(counts, found, 0.0)))


@triton.jit
def join_kurtoses(of_tensor, of_token, of_blocks, blocks, tokens, features):
    number, sums = tl.arange(0, 16), tl.zeros((16,), tl.float64)
    for start in range(0, blocks, 64):
        part = start + tl.arange(0, 64)
        within = (number < SUMS)[:, None] & (part < blocks)[None, :]
        sums += tl.sum(load_stored(of_blocks, number[:, None] * blocks + part[None, :], within, 0.0), axis=1)
    for rest in range(2):
        count = (tokens - rest).to(tl.float64) * features
        first, second = element_at(sums, 4 * rest) / count, element_at(sums, 4 * rest + 1) / count
        third, fourth = element_at(sums, 4 * rest + 2) / count, element_at(sums, 4 * rest + 3) / count
        tl.store(of_tensor + rest, tl.load(of_tensor + rest) + kurtosis(first, second, third, fourth))
        tl.store(of_token + rest, tl.load(of_token + rest) + element_at(sums, 8 + rest))


@triton.jit
def element_at(numbers, index):
    return tl.sum(tl.where(tl.arange(0, 16) == index, numbers, 0.0))


@triton.jit
def kurtosis(mean, square, cube, fourth):
    """Compute `reference_states.kurtosis`."""
    variance, of_mean = square - mean * mean, mean * mean
    central = fourth - 4 * mean * cube + 6 * of_mean * square - 3 * of_mean * of_mean
    constant = variance <= 1e-14 * square
    return tl.where(constant, 1.0, central / tl.where(constant, 1.0, variance * variance))


@triton.jit
def select(bins, rank):
    """Return the bin that holds the entry of a rank, and the number of entries in the bins before it; empty the
    bins."""
    chosen, before, total = 0, 0, 0
    for start in range(0, BINS, 2048):
        place = bins + start + tl.arange(0, 2048)
        count = tl.load(place, cache_modifier=".cg")
        tl.store(place, 0)
        reached = total + tl.cumsum(count, axis=0)
        below = reached <= rank
        chosen += tl.sum(below.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(below, reached, 0)))
        total += tl.sum(count)
    return chosen, before


@triton.jit
def leave_median(median, bits, most, sums):
    middle = bits.to(tl.float32, bitcast=True).to(tl.float64)
    largest = most.to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(median + 2, bits)
    tl.store(median + 3, most)
    tl.store(sums[0], tl.load(sums[0]) + largest)
    tl.store(sums[1], tl.load(sums[1]) + largest / middle)
