// Decode attention over INT8 pages, one persistent launch (decode.py compiles and launches it).
//
// The scheme is that of kernels_patch/reference.py, decode route: INT8 q.k with INT32 sums, W =
// p * sV quantised for each group of 32 neighbouring tokens, INT8 W.V, partitions merged by their
// log-sum-exp. Where half of the matrix instruction's rows would idle, q and W are two INT8 digits,
// and only K and V are rounded to INT8. Quantising W does not see a constant factor (its scale takes
// it up), so p is kept as exp(score - running max) and divided by the partition's sum once, at the
// partition's end.
//
// Work: all tiles of 32 tokens of all (request, KV head) pairs lie on one line, b outermost, and
// every CTA takes the same number of neighbours: every SM gets the same bytes whatever the batch.
// What one CTA has of one pair is a partition. When all of a pair's partitions are written, each of
// its CTAs merges its share of the output: one launch, and no CTA reads all the partitions. They
// wait for each other, so the launch is cooperative: all CTAs are resident or the launch fails.
//
// Inside a CTA one warp issues bulk copies of whole units (16 tokens, layout.py) into a ring of
// stages; each team of ROW_BLOCKS warps takes every TEAMS-th tile and needs no other team until the
// partition ends. Rows are (query position, head of the group); a warp holds ROWS_A_WARP of them.
//
// Lane (g, t) = (lane / 4, lane % 4) of mma.m16n8k32 holds, in the score accumulator, row g and
// columns 2t and 2t + 1, and as operand A of the second product row g and two runs of four k.
// Column n of score tile j is therefore given token 8 (n / 2) + 2 j + n % 2 of the 32: lane (g, t)
// then owns tokens 8t .. 8t+7, quantises them in its registers, and reads the same tokens of V as
// operand B. Nothing is exchanged between lanes but the maxima, and the group of W's scale is by
// construction the 32 tokens that the product consumes.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int UNIT_TOKENS = 16;
constexpr int TILE_TOKENS = 32;
constexpr int V_OFFSET = UNIT_TOKENS * HEAD_DIM;
constexpr int K_SCALE_OFFSET = 2 * UNIT_TOKENS * HEAD_DIM;
constexpr int V_SCALE_OFFSET = K_SCALE_OFFSET + 4 * UNIT_TOKENS;
constexpr int UNIT_BYTES = V_SCALE_OFFSET + 4 * UNIT_TOKENS;
// The second unit of a stage starts 64 bytes late: lanes t < 2 and t >= 2 read V of different units
// at the same offset, and would otherwise meet in the same shared-memory banks.
constexpr int SECOND_UNIT = UNIT_BYTES + 64;
constexpr int STAGE_BYTES = 2 * UNIT_BYTES + 128;
constexpr int ROWS = Q_LEN * GROUP;
// A stage belongs to one team for good. Were tiles k and k + STAGES of different teams, the second
// could find its barrier's last phase complete before tile k has landed, and take it for its own.
static_assert(STAGES % TEAMS == 0);
constexpr int WARPS = ROW_BLOCKS * TEAMS;
constexpr int R = ROWS_A_WARP / 8;         // rows that one lane holds
// The matrix instruction takes 16 rows. Where a warp has 8, the others hold what rounding left of
// queries and weights, as a second INT8 digit: RESIDUAL steps to one of the first.
constexpr float RESIDUAL = 254.0f;
constexpr int PART_STRIDE = HEAD_DIM + 8;  // floats; 8 more keep the eight rows in different banks
constexpr int MAGIC = 0x4B400000;          // 1.5 * 2^23: float(MAGIC + i) - 1.5 * 2^23 == i
constexpr float MAGIC_F = 12582912.0f;
#define MINUS_INFINITY __int_as_float(0xff800000)
constexpr float LEAST_AMAX = 1e-36f;       // below it 127 / amax overflows; the weight is then 0

// Shared memory, in bytes: the ring, the teams' partial outputs, their (max, sum), the barriers.
constexpr int PART_OFFSET = STAGES * STAGE_BYTES;
constexpr int STAT_OFFSET = PART_OFFSET + TEAMS * ROWS * PART_STRIDE * 4;
constexpr int BARRIER_OFFSET = STAT_OFFSET + TEAMS * ROWS * 8;

struct Arguments {
    const unsigned short *q;  // [B * Q_LEN, HKV * GROUP, HEAD_DIM], strides below
    unsigned short *out;      // the same shape
    const char *kv_cache;
    const int *block_table;   // [B, columns]
    const int *seq_lens;      // [B], the queries included
    float *partial;           // [2 * gridDim.x, ROWS, HEAD_DIM]
    float *partial_lse;       // [2 * gridDim.x, ROWS], base 2
    int *arrived;             // [B * HKV, 2], zero before and after: partitions written, merged
    u64 *ticks;               // counts launches; may be null
    i64 block_stride, head_stride;  // bytes
    i64 q_stride, out_stride;       // elements from token to token
    int table_stride, batch, kv_heads, least_tiles;
    float score_scale;        // sm_scale * log2(e)
};

__device__ __forceinline__ u32 shared_address(const void *p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}" ::"r"(bar), "r"(parity) : "memory");
}
// Pages are read once a step: marked first to be evicted, they leave L2 to everything else.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_copy(u32 to, const char *from, int bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}
__device__ __forceinline__ uint4 load16(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ uint2 load8(u32 a) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
    return v;
}
__device__ __forceinline__ void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float max_or_nan(float x, float y) {  // fmaxf would drop a NaN
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
template <class Max> __device__ __forceinline__ float over_lanes(float x, Max max) {  // of one row
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    return max(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ u32 pack4(float a, float b, float c, float d) {  // integers + MAGIC_F
    u32 low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
    u32 high = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
    return __byte_perm(low, high, 0x5410);
}
// x / y correctly rounded, given 1 / y correctly rounded (Markstein), without the slow path of the
// compiler's division; a rounded quotient is what the reference quantises, ties included.
__device__ __forceinline__ float divide(float x, float y, float inverse) {
    float quotient = x * inverse;
    return fmaf(fmaf(-quotient, y, x), inverse, quotient);
}
__device__ __forceinline__ float from_16(u32 bits) {  // low half of bits
#if FP16
    float x;
    asm("{.reg .b16 h;\ncvt.u16.u32 h, %1;\ncvt.f32.f16 %0, h;}" : "=f"(x) : "r"(bits));
    return x;
#else
    return __uint_as_float(bits << 16);
#endif
}
__device__ __forceinline__ u32 to_16x2(float low, float high) {
    u32 bits;
#if FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#endif
    return bits;
}
__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}
__device__ __forceinline__ int tiles_of(int seq_len) {
    return (seq_len + TILE_TOKENS - 1) / TILE_TOKENS;
}

// Where a CTA stands on the line of tiles. Every warp keeps its own copy.
struct Walk {
    int chunk, align, left;   // positions of a CTA; see span; those still to come
    int b, h, seq_len, tiles; // the pair and its tiles
    int first, tile;          // line position of its tile 0; the next tile of it

    // Positions that a pair takes up on the line: its tiles, or whole chunks of them.
    __device__ int span(int n) const { return (n + align - 1) / align * align; }

    // Sum of span over all pairs.
    __device__ int length(const Arguments &a, int lane) const {
        int sum = 0;
        for (int i = lane; i < a.batch; i += 32) sum += span(tiles_of(a.seq_lens[i]));
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        return sum * a.kv_heads;
    }

    // A partition that ends inside a chunk costs its CTA a second merge of teams and pairs, about
    // the time of MOST_EXTRA tiles: chunks up to that much longer that end with the pairs are better.
    __device__ void choose_chunk(const Arguments &a, int lane, int total) {
        constexpr int MOST_EXTRA = 8;
        const int ctas = gridDim.x, least = max(a.least_tiles, (total + ctas - 1) / ctas);
        for (int extra = 0; a.batch * a.kv_heads <= ctas && extra <= MOST_EXTRA; extra += max(1, extra)) {
            chunk = align = least + extra;
            if (length(a, lane) <= ctas * chunk) return;
        }
        chunk = least;
        align = 1;
    }

    __device__ bool start(const Arguments &a, int lane) {
        align = 1;
        choose_chunk(a, lane, length(a, lane));
        const int begin = blockIdx.x * chunk;
        int before = 0;
        for (int b0 = 0; b0 < a.batch; b0 += 32) {
            int n = b0 + lane < a.batch ? tiles_of(a.seq_lens[b0 + lane]) : 0;
            int upto = span(n) * a.kv_heads;
            for (int d = 1; d < 32; d *= 2) {
                int other = __shfl_up_sync(~0u, upto, d);
                if (lane >= d) upto += other;
            }
            u32 past = __ballot_sync(~0u, before + upto > begin);
            if (past) {
                int owner = __ffs(past) - 1;
                b = b0 + owner;
                tiles = __shfl_sync(~0u, n, owner);
                first = before + __shfl_sync(~0u, upto, owner) - span(tiles) * a.kv_heads;
                seq_len = a.seq_lens[b];
                h = (begin - first) / span(tiles);
                first += h * span(tiles);
                tile = begin - first;
                left = align > 1 ? min(chunk, tiles - tile) : chunk;
                return true;
            }
            before += __shfl_sync(~0u, upto, 31);
        }
        return false;  // past the last pair
    }
    __device__ int end() const { return min(tiles, tile + left); }
    __device__ bool next(const Arguments &a) {  // to the next pair; false when the chunk is done
        left -= end() - tile;
        if (left == 0 || align > 1) return false;
        first += tiles;
        tile = 0;
        if (++h == a.kv_heads) {
            h = 0;
            do
                if (++b == a.batch) return false;
            while ((seq_len = a.seq_lens[b]) <= 0);
            tiles = tiles_of(seq_len);
        }
        return true;
    }
    __device__ int first_cta() const { return first / chunk; }
    __device__ int last_cta() const { return (first + tiles - 1) / chunk; }
};

// The ring's state as producer and teams count it.
struct Ring {
    u32 base, full, empty;
    __device__ u32 stage(int k) const { return base + (k % STAGES) * STAGE_BYTES; }
    __device__ u32 full_bar(int k) const { return full + 8 * (k % STAGES); }
    __device__ u32 empty_bar(int k) const { return empty + 8 * (k % STAGES); }
    __device__ static int phase(int k) { return (k / STAGES) & 1; }
};

__device__ void produce(const Arguments &a, const Ring &ring, int lane) {
    const u64 policy = evict_first();
    Walk walk;
    if (!walk.start(a, lane)) return;
    int k = 0;
    do {
        const char *head = a.kv_cache + walk.h * a.head_stride;
        const int *table = a.block_table + static_cast<i64>(walk.b) * a.table_stride;
        int end = walk.end();
        for (int tile = walk.tile; tile < end; tile += 16) {  // 32 units: one for each lane
            int token = tile * TILE_TOKENS + lane * UNIT_TOKENS;
            bool present = token < walk.seq_len && token < end * TILE_TOKENS;
            const char *unit = head;
            if (present)
                unit += table[token / BLOCK_SIZE] * a.block_stride +
                        (token % BLOCK_SIZE) / UNIT_TOKENS * UNIT_BYTES;
            u32 presence = __ballot_sync(~0u, present);
            int n = min(16, end - tile);
            for (int i = 0; i < n; ++i, ++k) {
                barrier_wait(ring.empty_bar(k), Ring::phase(k) ^ 1);
                if (lane == 0)
                    barrier_expect(ring.full_bar(k), __popc(presence >> (2 * i) & 3) * UNIT_BYTES);
                __syncwarp();
                if (lane / 2 == i && present)
                    bulk_copy(ring.stage(k) + lane % 2 * SECOND_UNIT, unit, UNIT_BYTES,
                              ring.full_bar(k), policy);
            }
        }
    } while (walk.next(a));
}

// Eight neighbours of row r, in steps of its scale and at most 127 of them, into operand A; where
// the warp has no second row, into that one's place what rounding leaves.
__device__ __forceinline__ void quantise(const float (&x)[8], u32 (&a)[4], int r) {
    float digit[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) digit[e] = x[e] + MAGIC_F;
    a[r] = pack4(digit[0], digit[1], digit[2], digit[3]);
    a[2 + r] = pack4(digit[4], digit[5], digit[6], digit[7]);
    if (R == 1) {
#pragma unroll
        for (int e = 0; e < 8; ++e) digit[e] = fmaf(x[e] - (digit[e] - MAGIC_F), RESIDUAL, MAGIC_F);
        a[1] = pack4(digit[0], digit[1], digit[2], digit[3]);
        a[3] = pack4(digit[4], digit[5], digit[6], digit[7]);
    }
}

// One warp's rows of one partition.
struct Rows {
    u32 q[HEAD_DIM / 64][2][4];      // operand A: [64 dimensions][k step][a0 .. a3]
    float q_scale[R];                // with sm_scale and log2(e) in it
    float max[R], sum[R];            // base-2 score; sum over this lane's tokens only
    float out[HEAD_DIM / 8][2 * R];

    __device__ void load(const Arguments &a, int b, int h, int row_block, int g, int t) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            int row = row_block * ROWS_A_WARP + r * 8 + g;
            uint4 raw[HEAD_DIM / 64][2];
            const unsigned short *from = a.q + (static_cast<i64>(b) * Q_LEN + row / GROUP) * a.q_stride +
                                         (h * GROUP + row % GROUP) * HEAD_DIM + t * 16;
            float amax = 0;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 64; ++i)
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    raw[i][s] = row < ROWS ? *reinterpret_cast<const uint4 *>(from + i * 64 + s * 8)
                                           : make_uint4(0, 0, 0, 0);
                    const u32 words[4] = {raw[i][s].x, raw[i][s].y, raw[i][s].z, raw[i][s].w};
                    for (u32 w : words)
                        amax = max_or_nan(amax, max_or_nan(fabsf(from_16(w)), fabsf(from_16(w >> 16))));
                }
            amax = over_lanes(amax, max_or_nan);
            float scale = amax / 127.0f;
            float divisor = scale > 0 ? scale : 1.0f, inverse = 1.0f / divisor;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 64; ++i)
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const u32 words[4] = {raw[i][s].x, raw[i][s].y, raw[i][s].z, raw[i][s].w};
                    float x[8];
                    for (int e = 0; e < 4; ++e) {
                        x[2 * e] = divide(from_16(words[e]), divisor, inverse);
                        x[2 * e + 1] = divide(from_16(words[e] >> 16), divisor, inverse);
                    }
                    quantise(x, q[i][s], r);
                }
            q_scale[r] = scale * a.score_scale;
            max[r] = MINUS_INFINITY;
            sum[r] = 0;
        }
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2 * R; ++c) out[n][c] = 0;
    }

    // One tile. visible[r]: tokens of it that the row may see, looked at only where masked is true.
    __device__ void tile(u32 stage, int g, int t, bool masked, const int (&visible)[R]) {
        u32 k_at = stage + (g / 4 ? SECOND_UNIT : 0) + (g / 2 % 2 * 8 + g % 2) * 64 + t * 16;
        u32 unit_at = stage + (t / 2 ? SECOND_UNIT : 0);
        int score[4][4] = {};  // of rows g and g + 8, or of both digits of row g
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 64; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint4 k = load16(k_at + i * 64 * UNIT_TOKENS + j * 128);
                mma(score[j], q[i][0], k.x, k.y);
                mma(score[j], q[i][1], k.z, k.w);
            }
        float k_scale[8], v_scale[8];
        for (int e = 0; e < 8; e += 4) {
            uint4 ks = load16(unit_at + K_SCALE_OFFSET + t % 2 * 32 + e * 4);
            uint4 vs = load16(unit_at + V_SCALE_OFFSET + t % 2 * 32 + e * 4);
            const u32 kw[4] = {ks.x, ks.y, ks.z, ks.w}, vw[4] = {vs.x, vs.y, vs.z, vs.w};
            for (int i = 0; i < 4; ++i) {
                k_scale[e + i] = __uint_as_float(kw[i]);
                v_scale[e + i] = __uint_as_float(vw[i]);
            }
        }
        u32 w[4];  // operand A
        float w_scale[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float s[8], weight[8], peak = MINUS_INFINITY, amax = 0;
            for (int e = 0; e < 8; ++e) {
                s[e] = __int2float_rn(score[e / 2][2 * r + e % 2]);
                if (R == 1) s[e] = fmaf(__int2float_rn(score[e / 2][2 + e % 2]), 1 / RESIDUAL, s[e]);
                s[e] *= k_scale[e];
            }
            if (masked)
                for (int e = 0; e < 8; ++e)
                    if (8 * t + e >= visible[r]) s[e] = MINUS_INFINITY;
            for (int e = 0; e < 8; ++e) peak = fmaxf(peak, s[e]);
            // fmaxf drops the NaN of -inf * 0: a row of zeros that sees nothing.
            float new_max = fmaxf(max[r], over_lanes(peak, fmaxf) * q_scale[r]);
            // A row that has seen nothing keeps max -inf; minus 0, its p are still exp2(-inf).
            float base = new_max == MINUS_INFINITY ? 0.0f : new_max;
            float keep = exp2_fast(max[r] - base);
            max[r] = new_max;
            if (__any_sync(~0u, keep != 1.0f)) {
                sum[r] *= keep;
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; ++n) {
                    out[n][2 * r] *= keep;
                    out[n][2 * r + 1] *= keep;
                }
            }
            for (int e = 0; e < 8; ++e) {
                s[e] = exp2_fast(fmaf(s[e], q_scale[r], -base));
                weight[e] = s[e] * v_scale[e];
            }
            if (masked)  // once more: q_scale 0 made them NaN, and a free slot's scale may be NaN
                for (int e = 0; e < 8; ++e)
                    if (8 * t + e >= visible[r]) s[e] = weight[e] = 0;
            for (int e = 0; e < 8; ++e) {
                sum[r] += s[e];
                amax = max_or_nan(amax, weight[e]);
            }
            amax = over_lanes(amax, max_or_nan);
            float inverse = amax > LEAST_AMAX ? __fdividef(127.0f, amax) : 0.0f;
            w_scale[r] = amax * (1.0f / 127.0f);
            for (int e = 0; e < 8; ++e) weight[e] *= inverse;
            quantise(weight, w, r);
        }
        u32 v_at = unit_at + V_OFFSET + g * 16 + t % 2 * 8;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
            uint2 v = load8(v_at + n * 128);
            int o[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
            mma(o, w, v.x, v.y);
#pragma unroll
            for (int c = 0; c < 2 * R; ++c) {
                if (R == 1)
                    out[n][c] = fmaf(__int_as_float(o[2 + c]) - MAGIC_F, w_scale[0] * (1 / RESIDUAL), out[n][c]);
                out[n][c] = fmaf(__int_as_float(o[c]) - MAGIC_F, w_scale[c / 2], out[n][c]);
            }
        }
    }
};

// A partition that other CTAs have parts of too, until its pair is merged.
struct Pending {
    int pair, first_cta, n;  // n CTAs, this one among them
    unsigned short *out;
};

__device__ __forceinline__ void store_out(unsigned short *out, i64 stride, int row, int dim, float4 o) {
    *reinterpret_cast<uint2 *>(out + row / GROUP * stride + row % GROUP * HEAD_DIM + dim) =
        make_uint2(to_16x2(o.x, o.y), to_16x2(o.z, o.w));
}

// Where CTA c keeps its partition of a pair: it has two at most, one that starts in another CTA and
// one that ends in another.
__device__ __forceinline__ i64 slot_row(int cta, int first_cta, int row) {
    return static_cast<i64>(2 * cta + (cta == first_cta)) * ROWS + row;
}

// The end of a partition: the teams are merged in shared memory. Writes the output when the
// partition is all of its pair (false), else the partition for merge (true).
__device__ bool end_partition(const Arguments &a, const Walk &walk, const Rows &rows, char *shared,
                              int team, int row_block, int g, int t, Pending &pending) {
    float *part = reinterpret_cast<float *>(shared + PART_OFFSET);
    float2 *stat = reinterpret_cast<float2 *>(shared + STAT_OFFSET);
#pragma unroll
    for (int r = 0; r < R; ++r) {
        int row = row_block * ROWS_A_WARP + r * 8 + g;
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (row < ROWS) {
            row += team * ROWS;
            if (t == 0) stat[row] = make_float2(rows.max[r], sum);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n)
                *reinterpret_cast<float2 *>(part + row * PART_STRIDE + n * 8 + t * 2) =
                    make_float2(rows.out[n][2 * r], rows.out[n][2 * r + 1]);
        }
    }
    consumers_sync();
    pending.pair = walk.b * a.kv_heads + walk.h;
    pending.first_cta = walk.first_cta();
    pending.n = walk.last_cta() - pending.first_cta + 1;
    pending.out = a.out + static_cast<i64>(walk.b) * Q_LEN * a.out_stride + walk.h * GROUP * HEAD_DIM;
    const bool alone = pending.n == 1;
    const i64 slot = slot_row(blockIdx.x, pending.first_cta, 0);
    if (const int row = threadIdx.x; row < ROWS) {  // what each team's sums of the row count for
        float2 *teams = stat + row;
        float peak = MINUS_INFINITY, total = 0;
        for (int m = 0; m < TEAMS; ++m) peak = fmaxf(peak, teams[m * ROWS].x);
        const float base = peak == MINUS_INFINITY ? 0.0f : peak;
        for (int m = 0; m < TEAMS; ++m) total += exp2_fast(teams[m * ROWS].x - base) * teams[m * ROWS].y;
        const float inverse = total == 0 ? 0.0f : 1.0f / total;  // NaN stays NaN
        for (int m = 0; m < TEAMS; ++m) teams[m * ROWS].x = exp2_fast(teams[m * ROWS].x - base) * inverse;
        if (!alone) __stcg(a.partial_lse + slot + row, peak + log2f(total));  // -inf: it saw nothing
    }
    consumers_sync();
    constexpr int QUADS = ROWS * HEAD_DIM / 4, STEPS = (QUADS + WARPS * 32 - 1) / (WARPS * 32);
#pragma unroll 4
    for (int step = 0; step < STEPS; ++step) {
        const int i = threadIdx.x + step * WARPS * 32;
        if (QUADS % (WARPS * 32) && i >= QUADS) break;
        const int row = i / (HEAD_DIM / 4), dim = i % (HEAD_DIM / 4) * 4;
        float4 o = make_float4(0, 0, 0, 0);
        for (int m = 0; m < TEAMS; ++m) {
            const float weight = stat[m * ROWS + row].x;
            const float4 v = *reinterpret_cast<float4 *>(part + (m * ROWS + row) * PART_STRIDE + dim);
            o.x += weight * v.x, o.y += weight * v.y, o.z += weight * v.z, o.w += weight * v.w;
        }
        if (alone) store_out(pending.out, a.out_stride, row, dim, o);
        else __stcg(reinterpret_cast<float4 *>(a.partial + (slot + row) * HEAD_DIM + dim), o);
    }
    consumers_sync();  // all is written, and part is free again
    if (pending.n > 1 && threadIdx.x == 0)
        asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.s32 [%0], 1;" ::
                         "l"(a.arrived + 2 * pending.pair) : "memory");
    return pending.n > 1;
}

// Four dimensions of one row, gathered from partitions: sums relative to the largest lse so far.
struct Quad {
    float peak, total;
    float4 o;

    template <int N> __device__ void add(const float (&lse)[N], const float4 (&v)[N]) {
        float top = peak;
#pragma unroll
        for (int p = 0; p < N; ++p) top = fmaxf(top, lse[p]);
        const float base = top == MINUS_INFINITY ? 0.0f : top, keep = exp2_fast(peak - base);
        peak = top;
        total *= keep, o.x *= keep, o.y *= keep, o.z *= keep, o.w *= keep;
#pragma unroll
        for (int p = 0; p < N; ++p) {
            const float e = exp2_fast(lse[p] - base);
            total += e, o.x += e * v[p].x, o.y += e * v[p].y, o.z += e * v[p].z, o.w += e * v[p].w;
        }
    }
    // The quotient over a group of lanes, on all of them.
    __device__ float4 finish(int lanes) const {
        float top = peak;
        for (int d = lanes / 2; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        const float keep = exp2_fast(peak - top);  // some partition saw the row's own token: finite
        float sums[5] = {total * keep, o.x * keep, o.y * keep, o.z * keep, o.w * keep};
        for (int d = lanes / 2; d; d /= 2)
            for (float &sum : sums) sum += __shfl_xor_sync(~0u, sum, d);
        const float inverse = __fdividef(1.0f, sums[0]);  // of 1 to the number of partitions
        return make_float4(sums[1] * inverse, sums[2] * inverse, sums[3] * inverse, sums[4] * inverse);
    }
};

// This CTA's share of the output of a pair whose partitions are all written. Several lanes share a
// quad, so that a lane has few partitions of it to read: those are on their way at once.
__device__ void merge_share(const Arguments &a, const Pending &pending) {
    constexpr int QUADS = ROWS * HEAD_DIM / 4, AT_ONCE = 6;
    const int n = pending.n, lanes = n <= 4 ? 1 : n <= 8 ? 2 : n <= 16 ? 4 : 8;
    const int share = (QUADS + n - 1) / n, lane = threadIdx.x % lanes;
    const int begin = (blockIdx.x - pending.first_cta) * share, end = min(QUADS, begin + share);
    for (int i = begin + threadIdx.x / 32 * (32 / lanes); i < end; i += WARPS * 32 / lanes) {
        const int at = min(i + static_cast<int>(threadIdx.x) % 32 / lanes, end - 1);
        const int row = at / (HEAD_DIM / 4), dim = at % (HEAD_DIM / 4) * 4;
        Quad quad = {MINUS_INFINITY, 0, make_float4(0, 0, 0, 0)};
        for (int first = 0; first < n; first += AT_ONCE * lanes) {
            float lse[AT_ONCE];
            float4 v[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const int p = first + k * lanes + lane, cta = pending.first_cta + min(p, n - 1);
                const i64 from = slot_row(cta, pending.first_cta, row);
                lse[k] = __ldcg(a.partial_lse + from);
                v[k] = __ldcg(reinterpret_cast<const float4 *>(a.partial + from * HEAD_DIM + dim));
                if (p >= n) lse[k] = MINUS_INFINITY;
            }
            quad.add(lse, v);
        }
        const float4 o = quad.finish(lanes);
        if (lane == 0) store_out(pending.out, a.out_stride, row, dim, o);
    }
}

__device__ void merge(const Arguments &a, const Pending (&pending)[2], int n_pending) {
    const bool watches = static_cast<int>(threadIdx.x) < n_pending;
    int *written = watches ? a.arrived + 2 * pending[threadIdx.x].pair : nullptr;
    if (watches) {
        int count;
        do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(count) : "l"(written) : "memory");
        while (count < pending[threadIdx.x].n);
    }
    consumers_sync();
    for (int i = 0; i < n_pending; ++i) merge_share(a, pending[i]);
    // Nobody looks at the counters again once all n have come here: ready for the next launch.
    if (watches && atomicAdd(written + 1, 1) == pending[threadIdx.x].n - 1) written[0] = written[1] = 0;
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1)
int8_decode(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Ring ring;
    ring.base = shared_address(shared);
    ring.full = ring.base + BARRIER_OFFSET;
    ring.empty = ring.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(ring.full + 8 * s, 1);
            barrier_init(ring.empty + 8 * s, ROW_BLOCKS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (blockIdx.x == 0 && a.ticks) atomicAdd(a.ticks, 1ull);
    }
    __syncthreads();
    if (warp == WARPS) {
        produce(a, ring, lane);
        return;
    }
    const int team = warp / ROW_BLOCKS, row_block = warp % ROW_BLOCKS, g = lane / 4, t = lane % 4;
    Walk walk;
    if (!walk.start(a, lane)) return;
    int k = 0;  // tiles of this CTA before the present partition
    Pending pending[2];
    int n_pending = 0;
    do {
        Rows rows;
        rows.load(a, walk.b, walk.h, row_block, g, t);
        const int end = walk.end(), skip = ((team - k) % TEAMS + TEAMS) % TEAMS;
        for (int tile = walk.tile + skip; tile < end; tile += TEAMS) {
            const int i = k + tile - walk.tile;
            int visible[R];
            for (int r = 0; r < R; ++r) {
                int position = (row_block * ROWS_A_WARP + r * 8 + g) / GROUP;
                visible[r] = walk.seq_len - (Q_LEN - 1 - min(position, Q_LEN - 1)) - tile * TILE_TOKENS;
            }
            const bool masked = (tile + 1) * TILE_TOKENS > walk.seq_len - (Q_LEN - 1);
            barrier_wait(ring.full_bar(i), Ring::phase(i));
            rows.tile(ring.stage(i), g, t, masked, visible);
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.empty_bar(i));
        }
        k += end - walk.tile;
        // The first partition may belong to CTAs before, the last one to CTAs after; both wait until
        // this CTA has no work left that another one could be waiting for.
        if (end_partition(a, walk, rows, shared, team, row_block, g, t, pending[n_pending])) ++n_pending;
    } while (walk.next(a));
    if (n_pending) merge(a, pending, n_pending);
}
