"""Triton kernels of one decoding step: products with few rows, attention over the cache.

A step of a single row reads every weight once and computes little, so each kernel is a product with the operations
around it: the norm before it, and rotary embedding with cache write, residual addition or SwiGLU after it. A program
loads whole rows of a weight at once, before it waits for its input. With more rows, products go to cuBLAS, and the
kernels further down do what stands between them (`cuda.py`). The residual stream is fp32.
"""

import triton
import triton.language as tl


@triton.jit
def _wait(DEPENDENT: tl.constexpr):
    """Wait for the previous kernel. With dependent launch a kernel starts while the previous one still runs; before
    this line it may only read weights, which no kernel writes."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _inputs(BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """Inputs that a program loads weights of; for nf4, which has two in a byte, the pairs of them."""
    return tl.arange(0, BLOCK_K // 2) if FORMAT == "nf4" else tl.arange(0, BLOCK_K)


@triton.jit
def _load_weight(w, scales, levels, rows, k, K: tl.constexpr, FORMAT: tl.constexpr):
    """Load whole rows of a weight (outputs, inputs) for one use; for nf4 also the second input of each pair."""
    row = rows[:, None].to(tl.int64)
    if FORMAT == "nf4":
        inside = (k < K // 2)[None, :]
        codes = tl.load(w + row * (K // 2) + k[None, :], mask=inside, other=0, eviction_policy="evict_first")
        absmax = tl.load(scales + row * (K // 64) + (k // 32)[None, :], mask=inside, other=0.0).to(tl.float32)
        pair = tl.load(levels + codes.to(tl.int32))
        first = ((pair << 16).to(tl.float32, bitcast=True) * absmax).to(tl.bfloat16)
        second = ((pair & -65536).to(tl.float32, bitcast=True) * absmax).to(tl.bfloat16)
    else:
        first = tl.load(w + row * K + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
        second = first
    return first, second


@triton.jit
def _load_scale(scales, rows, FORMAT: tl.constexpr):
    """Load the factor of each output."""
    return tl.load(scales + rows) if FORMAT == "row_scales" else tl.full(rows.shape, 1.0, tl.float32)


@triton.jit
def _load_input(x_in, k, K: tl.constexpr, FORMAT: tl.constexpr):
    """Load the input of a single row; for nf4 the first and the second of each pair."""
    if FORMAT == "nf4":
        first = tl.load(x_in + 2 * k, mask=2 * k < K, other=0.0).to(tl.float32)
        second = tl.load(x_in + 2 * k + 1, mask=2 * k < K, other=0.0).to(tl.float32)
    else:
        first = tl.load(x_in + k, mask=k < K, other=0.0).to(tl.float32)
        second = first
    return first, second


@triton.jit
def _load_normed(h, norm, k, eps, K: tl.constexpr, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Load the RMS norm of the residual stream, rounded to the compute type, in the form of `_load_input`."""
    first, second = _load_input(h, k, K, FORMAT)
    norm_first, norm_second = _load_input(norm, k, K, FORMAT)
    squares = tl.sum(first * first, 0)
    if FORMAT == "nf4":
        squares += tl.sum(second * second, 0)
    rstd = tl.rsqrt(squares / K + eps)
    first = (first * rstd * norm_first).to(dtype).to(tl.float32)
    second = (second * rstd * norm_second).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _product(weight, x, FORMAT: tl.constexpr):
    total = weight[0].to(tl.float32) * x[0][None, :]
    if FORMAT == "nf4":
        total += weight[1].to(tl.float32) * x[1][None, :]
    return tl.sum(total, 1)


@triton.jit
def _rotate(low, high, cos, sin, position, d, half: tl.constexpr):
    """Rotate dimensions d of the first half of a head and their partners."""
    c, s = tl.load(cos + position * half + d), tl.load(sin + position * half + d)
    return low * c - high * s, high * c + low * s


@triton.jit
def qkv_kernel(
    h, norm, w, scales, levels, q_out, k_cache, v_cache, cos, sin, positions, eps, max_positions,
    K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm, query-key-value product, rotary embedding of a single row; keys and values go to the cache. A program
    computes BLOCK_N dimensions of the first half of a head and their partners of the second half."""
    half: tl.constexpr = D // 2
    blocks: tl.constexpr = half // BLOCK_N
    dtype: tl.constexpr = k_cache.dtype.element_ty
    head = tl.program_id(0) // blocks
    d = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _inputs(BLOCK_K, FORMAT)
    low_weight = _load_weight(w, scales, levels, head * D + d, k, K, FORMAT)
    high_weight = _load_weight(w, scales, levels, head * D + half + d, k, K, FORMAT)
    low_scale = _load_scale(scales, head * D + d, FORMAT)
    high_scale = _load_scale(scales, head * D + half + d, FORMAT)
    _wait(DEPENDENT)
    x = _load_normed(h, norm, k, eps, K, dtype, FORMAT)
    low, high = _product(low_weight, x, FORMAT) * low_scale, _product(high_weight, x, FORMAT) * high_scale
    position = tl.load(positions)
    if head < HEADS + KV_HEADS:
        low, high = _rotate(low, high, cos, sin, position, d, half)
    if head < HEADS:
        out = q_out + head * D + d
        tl.store(out, low.to(dtype))
        tl.store(out + half, high.to(dtype))
    elif position < max_positions:
        kv = (head - HEADS) % KV_HEADS
        offset = (kv.to(tl.int64) * max_positions + position) * D + d
        if head < HEADS + KV_HEADS:
            tl.store(k_cache + offset, low.to(dtype))
            tl.store(k_cache + offset + half, high.to(dtype))
        else:
            tl.store(v_cache + offset, low.to(dtype))
            tl.store(v_cache + offset + half, high.to(dtype))


@triton.jit
def residual_kernel(
    x_in, w, scales, levels, h,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add x W' to h."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _inputs(BLOCK_K, FORMAT)
    weight = _load_weight(w, scales, levels, n, k, K, FORMAT)
    scale = _load_scale(scales, n, FORMAT)
    _wait(DEPENDENT)
    x = _load_input(x_in, k, K, FORMAT)
    tl.store(h + n, tl.load(h + n) + _product(weight, x, FORMAT) * scale)


@triton.jit
def swiglu_kernel(
    h, norm, w, scales, levels, out, eps,
    K: tl.constexpr, N: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm, gate and up products (gate rows first in the weight), SwiGLU."""
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _inputs(BLOCK_K, FORMAT)
    gate_weight = _load_weight(w, scales, levels, n, k, K, FORMAT)
    up_weight = _load_weight(w, scales, levels, N + n, k, K, FORMAT)
    gate_scale, up_scale = _load_scale(scales, n, FORMAT), _load_scale(scales, N + n, FORMAT)
    _wait(DEPENDENT)
    x = _load_normed(h, norm, k, eps, K, dtype, FORMAT)
    gate, up = _product(gate_weight, x, FORMAT) * gate_scale, _product(up_weight, x, FORMAT) * up_scale
    tl.store(out + n, (gate * tl.sigmoid(gate) * up).to(dtype))


@triton.jit
def head_kernel(
    h, norm, w, logits, eps,
    K: tl.constexpr, N: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm and the audio head's product; fp32 logits."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight = _load_weight(w, None, None, tl.minimum(n, N - 1), k, K, "plain")
    _wait(DEPENDENT)
    x = _load_normed(h, norm, k, eps, K, w.dtype.element_ty, "plain")
    tl.store(logits + n, _product(weight, x, "plain"), mask=n < N)


@triton.jit
def decode_attention_kernel(
    q_in, k_cache, v_cache, positions, partial_sums, partial_norms, arrivals, out, scale, max_positions,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend with one query per row to its cached keys and values. A program reads SPLIT positions of one key head, for
    all query heads that share it. The last one to finish a row's head adds the partial results, (rows, query heads,
    MAX_SPLITS, D), in an order that does not depend on which was last. `scale` includes log2(e)."""
    queries: tl.constexpr = 16  # the smallest side of a matrix product; GROUP of them are real
    b, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = q_in.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float32 else "tf32"
    _wait(DEPENDENT)
    length = tl.minimum(tl.load(positions + b) + 1, max_positions).to(tl.int32)
    first = split * SPLIT
    if first < length:
        d = tl.arange(0, D)
        g = tl.arange(0, queries)
        real = g < GROUP
        head = (b * KV_HEADS + kv) * GROUP + g
        q = tl.load(q_in + head[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
        row = (b * KV_HEADS + kv).to(tl.int64) * max_positions * D
        best = tl.full((queries,), -float("inf"), tl.float32)
        norm = tl.zeros((queries,), tl.float32)
        total = tl.zeros((queries, D), tl.float32)
        last = tl.minimum(first + SPLIT, length)
        for start in range(first, last, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            inside = t < last
            place = row + t[:, None] * D + d[None, :]
            keys = tl.load(k_cache + place, mask=inside[:, None], other=0.0)
            values = tl.load(v_cache + place, mask=inside[:, None], other=0.0)
            scores = tl.dot(q, keys.trans(), input_precision=precision) * scale
            scores = tl.where(inside[None, :], scores, -float("inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - new_best[:, None])
            decay = tl.exp2(best - new_best)
            norm = norm * decay + tl.sum(weights, 1)
            total = tl.dot(weights.to(dtype), values, total * decay[:, None], input_precision=precision)
            best = new_best
        splits = tl.cdiv(length, SPLIT)
        if splits == 1:
            tl.store(out + head[:, None] * D + d[None, :], (total / norm[:, None]).to(dtype), mask=real[:, None])
        else:
            base = head.to(tl.int64) * MAX_SPLITS
            tl.store(partial_sums + (base + split)[:, None] * D + d[None, :], total, mask=real[:, None])
            tl.store(partial_norms + (base + split) * 2, best, mask=real)
            tl.store(partial_norms + (base + split) * 2 + 1, norm, mask=real)
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + b * KV_HEADS + kv, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                tl.store(arrivals + b * KV_HEADS + kv, 0)
                part = tl.arange(0, MAX_SPLITS)
                there = part < splits
                for query in tl.static_range(GROUP):
                    query_head = (b * KV_HEADS + kv) * GROUP + query
                    place = query_head.to(tl.int64) * MAX_SPLITS + part
                    bests = tl.load(partial_norms + place * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
                    norms = tl.load(partial_norms + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                    sums = partial_sums + place[:, None] * D + d[None, :]
                    sums = tl.load(sums, mask=there[:, None], other=0.0, cache_modifier=".cg")
                    weight = tl.exp2(bests - tl.max(bests, 0))
                    value = tl.sum(sums * weight[:, None], 0) / tl.sum(norms * weight, 0)
                    tl.store(out + query_head * D + d, value.to(dtype))


@triton.jit
def embed_kernel(codes, table, h, K: tl.constexpr, BOOKS: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the embeddings of a frame's codes into the residual stream."""
    b = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for book in tl.static_range(BOOKS):
        code = tl.load(codes + b * BOOKS + book)
        total += tl.load(table + (book * CLASSES + code) * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(h + b * K + k, total.to(table.dtype.element_ty).to(tl.float32), mask=k < K)


@triton.jit
def _load_expansion(w, slot, first, n, N: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr):
    """Load CHUNK ranks of a slot's B, which is (slots, RANK, N); zeros without a slot."""
    r = first + tl.arange(0, CHUNK)
    inside = (n < N)[None, :] & (slot >= 0)
    return tl.load(w + (slot * RANK + r)[:, None] * N + n[None, :], mask=inside, other=0.0)


@triton.jit
def _expand(
    weight, shrunk, w, slot, strength, projection, n,
    PROJECTIONS: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute what a row's adapter adds to outputs n, zero without an adapter. `weight` is the first result of
    `_load_expansion`, and `shrunk` the row's input multiplied by the A of all slots."""
    total = tl.zeros(n.shape, tl.float32)
    for first in tl.static_range(0, RANK, CHUNK):
        if first > 0:
            weight = _load_expansion(w, slot, first, n, N, RANK, CHUNK)
        r = first + tl.arange(0, CHUNK)
        own = tl.load(shrunk + (slot * PROJECTIONS + projection) * RANK + r, mask=slot >= 0, other=0.0)
        total += tl.sum(weight.to(tl.float32) * own.to(tl.float32)[:, None], 0)
    return total * strength


@triton.jit
def _store_quantized(y, codes, scale, b, k, K: tl.constexpr):
    """Store a row as fp8 codes with a scale that maps its absmax to the largest fp8 number."""
    largest = tl.maximum(tl.max(tl.abs(y), 0) / 448.0, 1.1754944e-38)
    tl.store(codes + b * K + k, (y / largest).to(tl.float8e4nv), mask=k < K)
    tl.store(scale + b, largest)


@triton.jit
def add_rms_norm_kernel(
    h, update, norm, out, codes, scale, shrunk, w, slots, strengths, eps, update_stride, shrunk_stride,
    K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
    QUANTIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add an update and the adapter's part to h, and write the norm of the result, with QUANTIZE also in fp8."""
    b = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    if RANK > 0:
        slot, strength = tl.load(slots + b), tl.load(strengths + b)
        weight = _load_expansion(w, slot, 0, k, K, RANK, CHUNK)
    factor = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    _wait(DEPENDENT)
    x = tl.load(h + b * K + k, mask=k < K, other=0.0)
    if ADD:
        x += tl.load(update + b * update_stride + k, mask=k < K, other=0.0).to(tl.float32)
        if RANK > 0:
            x += _expand(weight, shrunk + b * shrunk_stride, w, slot, strength, 0, k, 1, K, RANK, CHUNK)
        tl.store(h + b * K + k, x, mask=k < K)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    y = x * rstd * factor
    tl.store(out + b * K + k, y.to(out.dtype.element_ty), mask=k < K)
    if QUANTIZE:
        _store_quantized(y, codes, scale, b, k, K)


@triton.jit
def rotate_and_store_kernel(
    qkv, q_out, k_cache, v_cache, cos, sin, positions, shrunk, w, slots, strengths, max_positions,
    qkv_stride, shrunk_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr,
    CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Process GROUP heads of one kind after cuBLAS's product: add the adapter's part, rotate, write to the cache."""
    half: tl.constexpr = D // 2
    outputs: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    b, head = tl.program_id(0), tl.program_id(1) * GROUP
    i = tl.arange(0, GROUP * half)
    d = i % half
    n = (head + i // half) * D + d
    if RANK > 0:
        slot, strength = tl.load(slots + b), tl.load(strengths + b)
        low_weight = _load_expansion(w, slot, 0, n, outputs, RANK, CHUNK)
        high_weight = _load_expansion(w, slot, 0, n + half, outputs, RANK, CHUNK)
    _wait(DEPENDENT)
    position = tl.load(positions + b)
    source = qkv + b * qkv_stride + n
    low, high = tl.load(source).to(tl.float32), tl.load(source + half).to(tl.float32)
    if RANK > 0:
        projection = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
        own = shrunk + b * shrunk_stride
        low += _expand(low_weight, own, w, slot, strength, projection, n, 3, outputs, RANK, CHUNK)
        high += _expand(high_weight, own, w, slot, strength, projection, n + half, 3, outputs, RANK, CHUNK)
    dtype: tl.constexpr = k_cache.dtype.element_ty
    if head < HEADS + KV_HEADS:
        low, high = _rotate(low, high, cos, sin, position, d, half)
    if head < HEADS:
        out = q_out + b * HEADS * D + n
        tl.store(out, low.to(dtype))
        tl.store(out + half, high.to(dtype))
    elif position < max_positions:
        kv = (head - HEADS) % KV_HEADS + i // half
        offset = ((b.to(tl.int64) * KV_HEADS + kv) * max_positions + position) * D + d
        if head < HEADS + KV_HEADS:
            tl.store(k_cache + offset, low.to(dtype))
            tl.store(k_cache + offset + half, high.to(dtype))
        else:
            tl.store(v_cache + offset, low.to(dtype))
            tl.store(v_cache + offset + half, high.to(dtype))


@triton.jit
def place_prompt_kernel(
    qkv, q_out, k_out, v_out, k_cache, v_cache, cos, sin, order, row, length, max_positions,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rotate one head of a prompt's position; write it to its place in (heads, length, D) and to the cache."""
    half: tl.constexpr = D // 2
    i, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, half)
    source = qkv + (i * (HEADS + 2 * KV_HEADS) + head) * D + d
    low, high = tl.load(source).to(tl.float32), tl.load(source + half).to(tl.float32)
    position = tl.load(order + i)
    dtype: tl.constexpr = q_out.dtype.element_ty
    if head < HEADS + KV_HEADS:
        low, high = _rotate(low, high, cos, sin, position, d, half)
    low, high = low.to(dtype), high.to(dtype)
    if head < HEADS:
        out = q_out + (head * length + position) * D + d
        tl.store(out, low)
        tl.store(out + half, high)
    else:
        kv = (head - HEADS) % KV_HEADS
        place = (kv * length + position) * D + d
        cached = ((tl.load(row) * KV_HEADS + kv) * max_positions + position) * D + d
        if head < HEADS + KV_HEADS:
            tl.store(k_out + place, low)
            tl.store(k_out + place + half, high)
            tl.store(k_cache + cached, low)
            tl.store(k_cache + cached + half, high)
        else:
            tl.store(v_out + place, low)
            tl.store(v_out + place + half, high)
            tl.store(v_cache + cached, low)
            tl.store(v_cache + cached + half, high)


@triton.jit
def silu_multiply_kernel(
    gate_up, out, codes, scale,
    N: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute SwiGLU of (rows, 2 N), gate first. With QUANTIZE a program has a whole row."""
    b = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _wait(DEPENDENT)
    gate = tl.load(gate_up + b * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(gate_up + b * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + b * N + n, y.to(out.dtype.element_ty), mask=n < N)
    if QUANTIZE:
        _store_quantized(tl.where(n < N, y, 0.0), codes, scale, b, n, N)


@triton.jit
def adapted_silu_multiply_kernel(
    gate_up, out, shrunk, w, slots, strengths, rows, ranks, gate_up_stride, shrunk_stride,
    N: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute `silu_multiply_kernel` with what the rows' adapters add. No group has more outputs, so B, (slots, RANK,
    2 N), is read once for all rows. A row's part of the product with another slot is zero."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + m, mask=m < rows, other=-1)
    strength = tl.load(strengths + m, mask=m < rows, other=0.0)
    precision: tl.constexpr = "ieee" if w.dtype.element_ty == tl.float32 else "tf32"
    is_output = (m < rows)[:, None] & (n < N)[None, :]
    _wait(DEPENDENT)
    source = gate_up + m[:, None] * gate_up_stride + n[None, :]
    gate = tl.load(source, mask=is_output, other=0.0)  # read while B is being loaded
    up = tl.load(source + N, mask=is_output, other=0.0)
    gate_added = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_added = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, ranks, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        own = (k // RANK)[None, :] == slot[:, None]
        place = shrunk + m[:, None] * shrunk_stride + (k // RANK * 2 * RANK + k % RANK)[None, :]
        inside = (k < ranks)[:, None] & (n < N)[None, :]
        matrix = w + k[:, None] * (2 * N) + n[None, :]
        gate_shrunk = tl.load(place, mask=own, other=0.0).to(w.dtype.element_ty)
        up_shrunk = tl.load(place + RANK, mask=own, other=0.0).to(w.dtype.element_ty)
        gate_matrix = tl.load(matrix, mask=inside, other=0.0)
        up_matrix = tl.load(matrix + N, mask=inside, other=0.0)
        gate_added = tl.dot(gate_shrunk, gate_matrix, gate_added, input_precision=precision)
        up_added = tl.dot(up_shrunk, up_matrix, up_added, input_precision=precision)
    gate = gate.to(tl.float32) + gate_added * strength[:, None]
    up = up.to(tl.float32) + up_added * strength[:, None]
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + m[:, None] * N + n[None, :], y.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def quantize_rows_kernel(x, codes, scale, K: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize rows to fp8."""
    b = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    _store_quantized(tl.load(x + b * K + k, mask=k < K, other=0.0).to(tl.float32), codes, scale, b, k, K)


@triton.jit
def unpack_kernel(
    w, scales, levels, out,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Unpack a quantized weight (outputs, inputs) to the compute type, for products of several rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _inputs(BLOCK_K, FORMAT)
    first, second = _load_weight(w, scales, levels, n, k, K, FORMAT)
    row = out + n[:, None].to(tl.int64) * K
    if FORMAT == "nf4":
        inside = (2 * k < K)[None, :]
        tl.store(row + 2 * k[None, :], first, mask=inside)
        tl.store(row + 2 * k[None, :] + 1, second, mask=inside)
    else:
        values = first.to(tl.float32) * _load_scale(scales, n, FORMAT)[:, None]
        tl.store(row + k[None, :], values.to(out.dtype.element_ty), mask=(k < K)[None, :])
