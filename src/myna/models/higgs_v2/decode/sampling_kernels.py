"""Triton kernels that sample the codes of a frame and advance the state of the rows."""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """Hash 32 bits, as `myna.models.code_sampling.mix` does."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(key, classes):
    """Gumbel noise of each class under a key."""
    bits = _mix(key ^ classes.to(tl.uint32))
    uniform = ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _sortable(x):
    """Map floats to integers of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _argmax(x, classes):
    """Return the first of the largest."""
    return tl.min(tl.where(x == tl.max(x, 0), classes, 0x7FFFFFFF), 0)


@triton.jit
def sample_kernel(
    logits, codes, result, frames, ends, caps, seeds, temperatures, top_ks, top_ps, windows, limits, history,
    BOOKS: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
    BEGIN: tl.constexpr, END: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Sample one code: top-k, top-p, Gumbel noise keyed by seed, frame and codebook, repetition-aware redraw, delay
    pattern. `myna.models.code_sampling.sample_frame` does the same in torch, step by step. `result` is (rows, 2
    codebooks + 1): codes, log-probabilities (fp32 bits), and whether the row is still active."""
    b, book = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    raw = tl.load(logits + (b * BOOKS + book) * CLASSES + c, mask=c < CLASSES, other=-float("inf"))
    frame, end = tl.load(frames + b).to(tl.int32), tl.load(ends + b).to(tl.int32)
    allowed = (c != BEGIN) & ((c != END) | (book == 0)) & (c < CLASSES)
    x = tl.where(allowed, raw, -float("inf"))
    temperature = tl.load(temperatures + b)
    code = _argmax(x, c)
    if temperature > 0:
        k, p = tl.load(top_ks + b).to(tl.int32), tl.load(top_ps + b)
        scaled = x / temperature
        order = _sortable(scaled)
        low = tl.full((), -2147483648, tl.int64)
        if (k > 0) & (k < CLASSES):
            # The k-th largest logit is the largest threshold that at least k logits reach.
            high = tl.max(order, 0).to(tl.int64)
            while low < high:
                middle = (low + high + 1) >> 1
                if tl.sum((order >= middle.to(tl.int32)).to(tl.int32), 0) >= k:
                    low = middle
                else:
                    high = middle - 1
        kept = allowed & (order >= low.to(tl.int32))
        largest = tl.max(scaled, 0)
        mass = tl.where(kept, tl.exp(scaled - largest), 0.0)
        if p < 1:
            # A class stays while the mass of the classes above it is at most p; this finds the smallest such threshold.
            bound = p * tl.sum(mass, 0)
            high = tl.max(order, 0).to(tl.int64)
            low = tl.maximum(low, tl.min(tl.where(kept, order, 0x7FFFFFFF), 0).to(tl.int64))
            while low < high:
                middle = (low + high) >> 1
                if tl.sum(tl.where(order > middle.to(tl.int32), mass, 0.0), 0) <= bound:
                    high = middle
                else:
                    low = middle + 1
            kept = kept & (order >= low.to(tl.int32))
        seed = tl.load(seeds + b)
        key = _mix((seed & 0xFFFFFFFF).to(tl.uint32) ^ 0x9E3779B9)
        key = _mix(key ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
        key = _mix(key ^ frame.to(tl.uint32))
        code = _argmax(tl.where(kept, scaled + _gumbel(_mix(key ^ (2 * book).to(tl.uint32)), c), -float("inf")), c)
        window = tl.load(windows + b).to(tl.int32)
        if window > 0:
            back = tl.arange(0, HISTORY)
            seen = tl.load(
                history + (b * HISTORY + (frame - 1 - back + HISTORY) % HISTORY) * BOOKS + book,
                mask=back < frame,
                other=BEGIN,
            )
            special = (seen == BEGIN) | (seen == END)
            repeats = tl.sum(((seen == code) & (back < window) & (back < frame) & ~special).to(tl.int32), 0)
            if repeats >= tl.load(limits + b):
                noise = _gumbel(_mix(key ^ (2 * book + 1).to(tl.uint32)), c)
                code = _argmax(tl.where(allowed, x + noise, -float("inf")), c)
    code = tl.minimum(code.to(tl.int32), CLASSES - 1)  # logits that are not finite may have no maximum
    if (book == 0) & (end < 0) & (frame >= tl.load(caps + b)):
        code = tl.full((), END, tl.int32)
    if (end >= 0) & (book <= frame - end):
        code = tl.full((), END, tl.int32)
    if book >= frame:
        code = tl.full((), BEGIN, tl.int32)
    best = tl.max(raw, 0)
    chosen = tl.sum(tl.where(c == code, raw, 0.0), 0)
    log_prob = chosen - best - tl.log(tl.sum(tl.where(c < CLASSES, tl.exp(raw - best), 0.0), 0))
    tl.store(codes + b * BOOKS + book, code)
    tl.store(result + b * (2 * BOOKS + 1) + book, code)
    tl.store(result + b * (2 * BOOKS + 1) + BOOKS + book, log_prob.to(tl.int32, bitcast=True))


@triton.jit
def advance_kernel(
    codes, result, frames, ends, positions, active, history, rows,
    BOOKS: tl.constexpr, END: tl.constexpr, HISTORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the row state after a frame: its number, its end, the next position, the history of codes."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    running = (b < rows) & (tl.load(active + b, mask=b < rows, other=0) != 0)
    frame, end = tl.load(frames + b, mask=running, other=0), tl.load(ends + b, mask=running, other=0)
    for book in tl.static_range(BOOKS):
        code = tl.load(codes + b * BOOKS + book, mask=running, other=0)
        tl.store(history + (b * HISTORY + frame % HISTORY) * BOOKS + book, code, mask=running)
    first = tl.load(codes + b * BOOKS, mask=running, other=0)
    ended = (end < 0) & (frame > 0) & (first == END)
    end = tl.where(ended, frame, end)
    tl.store(ends + b, end, mask=running)
    tl.store(positions + b, tl.load(positions + b, mask=running, other=0) + 1, mask=running)
    tl.store(frames + b, frame + 1, mask=running)
    finished = (end >= 0) & (frame >= end + BOOKS - 1)
    tl.store(active + b, tl.where(finished, 0, 1), mask=running)
    tl.store(result + b * (2 * BOOKS + 1) + 2 * BOOKS, (running & ~finished).to(tl.int32), mask=b < rows)
