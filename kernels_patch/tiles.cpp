// One tile of attention: INT8 scores, softmax, grouped INT8 weights, INT8 output sums; and the same
// in float32 for the first chunk.
//
// Compiled once for each instruction set (build.py passes the flags and KP_TILES, the name of the
// table). Vectors are the compiler's own vector types; only the 4-byte dot products and the packing
// of weights are written for each set. Everything but the table sits in an anonymous namespace and
// no C++ library header is included: a function that two objects shared could be linked from the
// wrong one, and stop the process on an older CPU.
#include "tiles.h"

#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

// Lanes of a vector. Wider than the registers, a compiler keeps them in memory.
#if defined(__AVX512F__)
constexpr int L = 16;
#elif defined(__ARM_NEON)
constexpr int L = 4;
#else
constexpr int L = 8;
#endif

typedef float F __attribute__((vector_size(4 * L)));
typedef int32_t I __attribute__((vector_size(4 * L)));

constexpr int kGranuleVecs = kGranuleTokens / L;
constexpr int kRowsAtOnce = 4;  // 4 rows x 2 vectors of sums fill the registers of AVX2
constexpr float kMasked = -1e30f;

inline F load(const float* p) { F v; memcpy(&v, p, sizeof v); return v; }
inline I load(const int8_t* p) { I v; memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, F v) { memcpy(p, &v, sizeof v); }
inline F all(float x) { return x - F{}; }
inline I all(int32_t x) { return x - I{}; }
inline I all_4(const void* p) { int32_t x; memcpy(&x, p, 4); return all(x); }
inline F to_float(I v) { return __builtin_convertvector(v, F); }
inline F max(F a, F b) { return a > b ? a : b; }
inline I max(I a, I b) { return a > b ? a : b; }
inline int smaller(int a, int b) { return a < b ? a : b; }

// Where a token's first item lies in tiles of [rows][16 tokens].
inline int first_of(int token, int rows) { return token / 16 * 16 * rows + token % 16; }

inline I lanes() {
  I v;
  for (int i = 0; i < L; ++i) v[i] = i;
  return v;
}

template <class T, class V>
inline T horizontal_max(V v) {
  typedef T Four __attribute__((vector_size(16)));
  Four part[L / 4];
  memcpy(part, &v, sizeof part);
  for (int i = 1; i < L / 4; ++i) part[0] = part[i] > part[0] ? part[i] : part[0];
  const T a = part[0][0] > part[0][1] ? part[0][0] : part[0][1];
  const T b = part[0][2] > part[0][3] ? part[0][2] : part[0][3];
  return a > b ? a : b;
}

inline float horizontal_sum(F v) {
  float sum = 0;
  for (int i = 0; i < L; ++i) sum += v[i];
  return sum;
}

// 2^x for x <= 0, relative error below 4e-6 (a weight keeps 7 bits). Below -100 it stays at 2^-100,
// where a product with a scale is not yet denormal (and slow).
inline F exp2(F x) {
  const F magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  x = x < all(-100.0f) ? all(-100.0f) : x;  // this way round NaN stays NaN
  const F shifted = x + magic;
  const F f = x - (shifted - magic);
  const F p = 1.0f + f * (0.69312418f + f * (0.24024099f + f * (0.055906426f + f * 0.009582853f)));
  return (F)((I)p + ((I)shifted << 23));
}

// ---- the 4-byte dot products: acc lane i += sum of a[4i .. 4i+3] * b[4i .. 4i+3], exact ----

#if defined(__AVX512VNNI__)
// vpdpbusd takes unsigned times signed: K + 128 is unsigned, and what that adds to a row's score,
// 128 * sum(q), is where the row's sums start from.
typedef I KVec;
inline KVec as_key(I k) { return k ^ all(int32_t(0x80808080)); }
inline I dot_key(I acc, const KVec& k, I q) {
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)k, (__m512i)q);
}
inline I dot_weight(I acc, I w, I v) {
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)v);
}
inline int32_t first_sum(const int8_t* q, int n) {
  int32_t sum = 0;
  for (int i = 0; i < n; ++i) sum += q[i];
  return -128 * sum;
}
#else
inline int32_t first_sum(const int8_t*, int) { return 0; }
#if defined(__AVX2__)
// vpmaddubsw saturates at 16 bits, but |k| <= 128 times |q| <= 127 twice is 32512: it cannot here.
// The sign of k moves over to q, which is never -128 and so can always be negated.
struct KVec { __m256i signs, size; };
inline KVec as_key(I k) { return {(__m256i)k, _mm256_abs_epi8((__m256i)k)}; }
inline I add_pairs(I acc, __m256i pairs) {
  return acc + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline I dot_key(I acc, const KVec& k, I q) {
  return add_pairs(acc, _mm256_maddubs_epi16(k.size, _mm256_sign_epi8((__m256i)q, k.signs)));
}
// Weights are 0 to 127 and V is at least -128: 32512 again.
inline I dot_weight(I acc, I w, I v) {
  return add_pairs(acc, _mm256_maddubs_epi16((__m256i)w, (__m256i)v));
}
#else
typedef I KVec;
inline KVec as_key(I k) { return k; }
#if defined(__ARM_FEATURE_DOTPROD)
inline I dot_weight(I acc, I a, I b) {
  return (I)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
}
#elif defined(__ARM_NEON)
inline I dot_weight(I acc, I a, I b) {
  const int8x16_t x = (int8x16_t)a, y = (int8x16_t)b;
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(x, y));
  return acc + (I)vpaddq_s32(low, high);
}
#else
inline I dot_weight(I acc, I a, I b) {
  acc += ((a << 24) >> 24) * ((b << 24) >> 24);
  acc += ((a << 16) >> 24) * ((b << 16) >> 24);
  acc += ((a << 8) >> 24) * ((b << 8) >> 24);
  return acc + (a >> 24) * (b >> 24);
}
#endif
inline I dot_key(I acc, const KVec& k, I q) { return dot_weight(acc, k, q); }
#endif
#endif

// Rounds 32 floats of 0 to 127 half to even, and stores them as bytes.
inline void store_weights(const float* x, F times, uint8_t* out) {
#if defined(__AVX512F__)
  for (int i = 0; i < 2; ++i) {
    const __m512i whole = _mm512_cvtps_epi32((__m512)(load(x + i * L) * times));
    _mm_storeu_si128((__m128i*)(out + i * L), _mm512_cvtepi32_epi8(whole));
  }
#elif defined(__AVX2__)
  __m256i whole[4];
  for (int i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32((__m256)(load(x + i * L) * times));
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]),
                                           _mm256_packs_epi32(whole[2], whole[3]));
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(bytes, in_order));
#else
  typedef uint8_t Bytes __attribute__((vector_size(L)));
  for (int i = 0; i < kGranuleVecs; ++i) {
    const F shifted = load(x + i * L) * times + all(12582912.0f);
    const Bytes b = __builtin_convertvector((I)shifted & all(0xff), Bytes);
    memcpy(out + i * L, &b, sizeof b);
  }
#endif
}

// Scores of R rows and one granule: (q . k) * sK, and each row's largest so far. `ahead` is what is
// read next, as far from each byte as the granules lie apart.
template <int R>
inline void score_granule(const Granule& granule, const int8_t* next, const int8_t* q, int head_dim,
                          const int32_t* start, const int* limit, int base, bool whole,
                          float (*score)[kTileTokens], F* top) {
  const int64_t ahead = next - granule.k;
  for (int t = 0; t < kGranuleTokens; t += 2 * L) {
    I sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = all(start[r]);
    const int8_t* k0 = granule.k + 4 * first_of(t, head_dim / 4);
    const int8_t* k1 = granule.k + 4 * first_of(t + L, head_dim / 4);
    for (int d = 0; d < head_dim; d += 4, k0 += 64, k1 += 64) {
      __builtin_prefetch(k0 + ahead);  // as a rule one cache line
      if (L == 16) __builtin_prefetch(k1 + ahead);
      const KVec a = as_key(load(k0)), b = as_key(load(k1));
      for (int r = 0; r < R; ++r) {
        const I four = all_4(q + r * head_dim + d);
        sum[r][0] = dot_key(sum[r][0], a, four);
        sum[r][1] = dot_key(sum[r][1], b, four);
      }
    }
    for (int half = 0; half < 2; ++half) {
      const int token = t + half * L;
      const F scale = load(granule.k_scale + token);
      for (int r = 0; r < R; ++r) {
        F s = to_float(sum[r][half]) * scale;
        // Bytes behind the last token may be anything, NaN scales included.
        if (!whole) s = lanes() + (base + token) < all(limit[r]) ? s : all(kMasked);
        store(score[r] + base + token, s);
        top[r] = max(s, top[r]);
      }
    }
  }
}

// Scores of one row to weights exp2(score - peak) * sV, in place; returns the sum of exp2 and the
// largest weight (compared as integers: weights are not negative, and NaN must win).
inline F weigh_group(const Granule* granules, int n_granules, int base, int limit, float q_scale,
                     float peak, float* score, float* largest) {
  F total{};
  I top{};
  for (int g = 0; g < n_granules; ++g) {
    const bool whole = base + (g + 1) * kGranuleTokens <= limit;
    for (int i = 0; i < kGranuleVecs; ++i) {
      const int token = g * kGranuleTokens + i * L;
      F p = exp2(load(score + token) * q_scale - peak);
      F w = p * load(granules[g].v_scale + i * L);
      if (!whole) {
        const I seen = lanes() + (base + token) < all(limit);
        p = seen ? p : F{};
        w = seen ? w : F{};
      }
      total += p;
      top = max((I)w, top);
      store(score + token, w);
    }
  }
  const int32_t bits = horizontal_max<int32_t>(top);
  memcpy(largest, &bits, 4);
  return total;
}

// out += W * V of R rows and one group.
template <int R>
inline void add_group(const Granule* granules, int n_granules, int n_next, int head_dim,
                      const uint8_t (*w)[kTileTokens], int base, const float* w_scale, float* out,
                      int out_stride) {
  for (int d = 0; d < head_dim; d += 2 * L) {
    I sum[R][2] = {};
    for (int g = 0; g < n_granules; ++g) {
      const int8_t* v = granules[g].v + d * 4;
      const int64_t ahead = granules[g < n_next ? g + n_granules : g].v - granules[g].v;
      for (int t = 0; t < kGranuleTokens; t += 4, v += head_dim * 4) {
        __builtin_prefetch(v + ahead);
        const I a = load(v), b = load(v + 4 * L);
        for (int r = 0; r < R; ++r) {
          const I four = all_4(w[r] + base + g * kGranuleTokens + t);
          sum[r][0] = dot_weight(sum[r][0], four, a);
          sum[r][1] = dot_weight(sum[r][1], four, b);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      float* o = out + r * out_stride + d;
      store(o, load(o) + to_float(sum[r][0]) * w_scale[r]);
      store(o + L, load(o + L) + to_float(sum[r][1]) * w_scale[r]);
    }
  }
}

// One row's maximum after a tile whose largest score is `top`; what was summed before is brought
// down to it.
inline float raise_peak(float top, float* peak, float* total, float* out, int head_dim) {
  if (top > *peak) {
    const float decay = exp2(all(*peak - top))[0];
    *peak = top;
    *total *= decay;
    for (int d = 0; d < head_dim; d += L) store(out + d, load(out + d) * decay);
  }
  return *peak;
}

template <int R>
void attend_rows(const Granule* granules, int group, const Rows& rows, int first) {
  const int D = rows.head_dim;
  const int8_t* q = rows.q + first * D;
  const int* limit = rows.limit + first;
  float* out = rows.out + first * rows.out_stride;
  alignas(64) float score[R][kTileTokens];
  alignas(64) uint8_t weight[R][kTileTokens];
  float w_scale[kTileTokens / kGranuleTokens][R];

  int longest = limit[0], shortest = limit[0];
  int32_t start[R];
  F top[R];
  for (int r = 0; r < R; ++r) {
    longest = limit[r] > longest ? limit[r] : longest;
    shortest = smaller(limit[r], shortest);
    start[r] = first_sum(q + r * D, D);
    top[r] = all(kMasked);
  }
  if (longest <= 0) return;
  const int n_granules = (longest + kGranuleTokens - 1) / kGranuleTokens;
  for (int g = 0; g < n_granules; ++g) {
    const int base = g * kGranuleTokens;
    const int8_t* next = g + 1 < n_granules ? granules[g + 1].k : granules[0].v;
    score_granule<R>(granules[g], next, q, D, start, limit, base,
                     base + kGranuleTokens <= shortest, score, top);
  }

  const int group_granules = group / kGranuleTokens;
  for (int r = 0; r < R; ++r) {
    const float q_scale = rows.q_scale[first + r];
    const float peak =
        raise_peak(horizontal_max<float>(top[r]) * q_scale, rows.peak + first + r,
                   rows.total + first + r, out + r * rows.out_stride, D);
    F sum{};
    for (int g = 0, j = 0; g < n_granules; g += group_granules, ++j) {
      const int n = smaller(group_granules, n_granules - g);
      float* s = score[r] + g * kGranuleTokens;
      float largest;
      sum += weigh_group(granules + g, n, g * kGranuleTokens, limit[r], q_scale, peak, s, &largest);
      const F inverse = all(largest > 1e-36f ? 127.0f / largest : 0.0f);
      w_scale[j][r] = largest * (1.0f / 127.0f);
      for (int i = 0; i < n; ++i)
        store_weights(s + i * kGranuleTokens, inverse, weight[r] + (g + i) * kGranuleTokens);
    }
    rows.total[first + r] += horizontal_sum(sum);
  }

  for (int g = 0, j = 0; g < n_granules; g += group_granules, ++j)
    add_group<R>(granules + g, smaller(group_granules, n_granules - g),
                 n_granules - g - group_granules, D, weight, g * kGranuleTokens, w_scale[j], out, rows.out_stride);
}

template <int R>
void attend_float_rows(const FloatTile& tile, const FloatRows& rows, int first) {
  const int D = rows.head_dim;
  const float* q = rows.q + first * D;
  const int* limit = rows.limit + first;
  float* out = rows.out + first * rows.out_stride;
  alignas(64) float score[R][kTileTokens];

  int longest = limit[0], shortest = limit[0];
  F top[R];
  for (int r = 0; r < R; ++r) {
    longest = limit[r] > longest ? limit[r] : longest;
    shortest = smaller(limit[r], shortest);
    top[r] = all(kMasked);
  }
  if (longest <= 0) return;
  const int n_tokens = (longest + kGranuleTokens - 1) / kGranuleTokens * kGranuleTokens;
  for (int t = 0; t < n_tokens; t += 2 * L) {
    F sum[R][2] = {};
    const float* k0 = tile.k + first_of(t, D);
    const float* k1 = tile.k + first_of(t + L, D);
    for (int d = 0; d < D; ++d, k0 += 16, k1 += 16) {
      const F a = load(k0), b = load(k1);
      for (int r = 0; r < R; ++r) {
        const F x = all(q[r * D + d]);
        sum[r][0] += x * a;
        sum[r][1] += x * b;
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int half = 0; half < 2; ++half) {
        F s = sum[r][half];
        const int token = t + half * L;
        if (t + 2 * L > shortest) s = lanes() + token < all(limit[r]) ? s : all(kMasked);
        store(score[r] + token, s);
        top[r] = max(s, top[r]);
      }
    }
  }

  for (int r = 0; r < R; ++r) {
    const float peak =
        raise_peak(horizontal_max<float>(top[r]) * rows.q_scale, rows.peak + first + r,
                   rows.total + first + r, out + r * rows.out_stride, D);
    F sum{};
    for (int t = 0; t < n_tokens; t += L) {
      F p = exp2(load(score[r] + t) * rows.q_scale - peak);
      if (t + L > limit[r]) p = lanes() + t < all(limit[r]) ? p : F{};
      sum += p;
      store(score[r] + t, p);
    }
    rows.total[first + r] += horizontal_sum(sum);
  }

  for (int d = 0; d < D; d += 2 * L) {
    F sum[R][2];
    for (int r = 0; r < R; ++r) {
      sum[r][0] = load(out + r * rows.out_stride + d);
      sum[r][1] = load(out + r * rows.out_stride + d + L);
    }
    const float* v = tile.v + d;
    for (int t = 0; t < longest; ++t, v += rows.out_stride) {
      const F a = load(v), b = load(v + L);
      for (int r = 0; r < R; ++r) {
        const F p = all(score[r][t]);
        sum[r][0] += p * a;
        sum[r][1] += p * b;
      }
    }
    for (int r = 0; r < R; ++r) {
      store(out + r * rows.out_stride + d, sum[r][0]);
      store(out + r * rows.out_stride + d + L, sum[r][1]);
    }
  }
}

void attend(const Granule* granules, int group, const Rows& rows) {
  int r = 0;
  for (; r + kRowsAtOnce <= rows.count; r += kRowsAtOnce)
    attend_rows<kRowsAtOnce>(granules, group, rows, r);
  switch (rows.count - r) {
    case 3: return attend_rows<3>(granules, group, rows, r);
    case 2: return attend_rows<2>(granules, group, rows, r);
    case 1: return attend_rows<1>(granules, group, rows, r);
  }
}

void attend_float(const FloatTile& tile, const FloatRows& rows) {
  int r = 0;
  for (; r + kRowsAtOnce <= rows.count; r += kRowsAtOnce)
    attend_float_rows<kRowsAtOnce>(tile, rows, r);
  for (; r < rows.count; ++r) attend_float_rows<1>(tile, rows, r);
}

void quantise(const float* x, int n, int8_t* q, float* scale) {
  int32_t top = 0;
  for (int i = 0; i < n; ++i) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  float amax;
  memcpy(&amax, &top, 4);
  *scale = amax / 127.0f;
  const float divisor = *scale == 0.0f ? 1.0f : *scale;
  const float zero_if_no_scale = *scale == 0.0f ? 0.0f : 127.0f;
  for (int i = 0; i < n; ++i) {
    float y = x[i] / divisor;
    y = y > zero_if_no_scale ? zero_if_no_scale : y;
    y = y < -zero_if_no_scale ? -zero_if_no_scale : y;
    const float shifted = y + 12582912.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    q[i] = int8_t(bits);
  }
}

void attend_plain(const float* q, float q_scale, const int8_t* k, const int8_t* v,
                  const float* k_scale, const float* v_scale, int n_tokens, int head_dim,
                  float* peak, float* total, float* out) {
  alignas(64) float score[kTileTokens];
  float top = kMasked;
  for (int t = 0; t < n_tokens; ++t) {
    const int8_t* row = k + t * head_dim;
    float part[L] = {};
    int d = 0;
    for (; d + L <= head_dim; d += L)
      for (int i = 0; i < L; ++i) part[i] += q[d + i] * row[d + i];
    for (int i = 0; d + i < head_dim; ++i) part[i] += q[d + i] * row[d + i];
    score[t] = horizontal_sum(load(part)) * k_scale[t] * q_scale;
    top = score[t] > top ? score[t] : top;
  }
  for (int t = n_tokens; t % L; ++t) score[t] = kMasked;
  F sum{};
  for (int t = 0; t < n_tokens; t += L) {
    F p = exp2(load(score + t) - top);
    p = lanes() + t < all(n_tokens) ? p : F{};
    sum += p;
    store(score + t, p);
  }
  for (int d = 0; d < head_dim; ++d) out[d] = 0;
  for (int t = 0; t < n_tokens; ++t) {
    const float w = score[t] * v_scale[t];
    const int8_t* row = v + t * head_dim;
    for (int d = 0; d < head_dim; ++d) out[d] += w * row[d];
  }
  *peak = top;
  *total = horizontal_sum(sum);
}

}  // namespace

extern "C" const TileOps KP_TILES = {KP_TILES_NAME, attend, attend_float, quantise,
                                    attend_plain};
