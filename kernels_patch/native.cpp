// INT8 KV attention over paged caches for the CPU: the routes, in terms of tiles (tiles.h).
//
// Knows pages, requests and threads; knows no instruction set and no torch. Every function is called
// through ctypes (native.py, which checks shapes and types) and returns 0, or the number of a Status.
// Threads are those of the OpenMP runtime that torch has loaded: this library is linked against none.
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "tiles.h"

namespace {

enum Status : int { kOk = 0, kBlockOutOfRange = 1, kSlotOutOfRange = 2 };
enum Type : int { kFloat32 = 0, kBFloat16 = 1 };

constexpr float kLog2E = 1.44269504f;
constexpr int kPartitionTokens = 256;
constexpr int kPrefixTileTokens = 128;
constexpr int kPrefixRows = 128;  // query rows that reuse one K/V tile
constexpr int kStrideTokens = 32;  // tokens that one thread writes together

struct Set {
  const TileOps* ops;
  bool supported;
};

const std::vector<Set>& sets() {
  static const std::vector<Set> all = [] {
    std::vector<Set> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    found.push_back({&kp_tiles_avx512, avx2 && __builtin_cpu_supports("avx512f") &&
                                           __builtin_cpu_supports("avx512bw") &&
                                           __builtin_cpu_supports("avx512vl") &&
                                           __builtin_cpu_supports("avx512dq") &&
                                           __builtin_cpu_supports("avx512vnni")});
    found.push_back({&kp_tiles_avx2, avx2});
#elif defined(__aarch64__)
    found.push_back({&kp_tiles_dotprod, (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0});
#endif
    found.push_back({&kp_tiles_portable, true});
    return found;
  }();
  return all;
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }
int round_up(int a, int b) { return ceil_div(a, b) * b; }

// Query rows of a KV head lie token by token. Blocks of rows shrink until every thread has a few,
// because the causal mask makes their work unequal.
int choose_block_rows(int64_t all_rows) {
  const int64_t wanted = all_rows / (8 * omp_get_max_threads()) / 4 * 4;
  return int(std::clamp<int64_t>(wanted, 4, kPrefixRows));
}

// A block of query rows of one request and KV head; `row` counts tokens times heads of the group.
struct RowBlock { int request, head, row; };

// All blocks of a step. The last rows of a request see most tokens: they go first, so that no
// thread is left with one at the end.
void list_row_blocks(const int32_t* query_start_loc, int n_requests, int n_kv_heads, int n_shared,
                     int block_rows, std::vector<RowBlock>* out) {
  out->clear();
  for (int n = 0; n < n_requests; ++n) {
    const int n_rows = (query_start_loc[n + 1] - query_start_loc[n]) * n_shared;
    for (int row = (ceil_div(n_rows, block_rows) - 1) * block_rows; row >= 0; row -= block_rows)
      for (int head = 0; head < n_kv_heads; ++head) out->push_back({n, head, row});
  }
}

// Rows of float32 or bfloat16 [tokens][heads][D], strides in elements.
struct Tensor {
  void* data;
  int type;
  int64_t token_stride, head_stride;

  const float* read(int64_t token, int head, int n, float* scratch) const {
    const int64_t at = token * token_stride + head * head_stride;
    if (type == kFloat32) return static_cast<const float*>(data) + at;
    const uint16_t* from = static_cast<const uint16_t*>(data) + at;
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = uint32_t(from[i]) << 16;
      memcpy(scratch + i, &bits, 4);
    }
    return scratch;
  }

  void write(int64_t token, int head, int n, const float* x, float times) const {
    const int64_t at = token * token_stride + head * head_stride;
    if (type == kFloat32) {
      float* to = static_cast<float*>(data) + at;
      for (int i = 0; i < n; ++i) to[i] = x[i] * times;
      return;
    }
    uint16_t* to = static_cast<uint16_t*>(data) + at;
    for (int i = 0; i < n; ++i) {
      const float y = x[i] * times;
      uint32_t bits;
      memcpy(&bits, &y, 4);
      if (y != y) bits = 0x7fc00000;  // rounding must not carry a NaN into infinity
      else bits += 0x7fff + (bits >> 16 & 1);  // to nearest, half to even
      to[i] = uint16_t(bits >> 16);
    }
  }
};

// Pages of one cache; layout.py says what lies where.
struct Cache {
  int8_t* data;
  int64_t n_blocks, block_stride, head_stride;
  int block_size, head_dim;

  int8_t* page(int64_t block, int head) const {
    return data + block * block_stride + head * head_stride;
  }
  float* k_scales(int8_t* page) const {
    return reinterpret_cast<float*>(page + 2 * block_size * head_dim);
  }
  float* v_scales(int8_t* page) const { return k_scales(page) + block_size; }

  // Granules of tokens first .. end (a multiple of 32, and any) of one request and head.
  bool granules(const int32_t* blocks, int head, int first, int end, Granule* out) const {
    for (int t = first; t < end; t += kGranuleTokens) {
      const int64_t block = blocks[t / block_size];
      if (block < 0 || block >= n_blocks) return false;
      int8_t* p = page(block, head);
      const int at = t % block_size;
      *out++ = {p + at * head_dim, p + (block_size + at) * head_dim, k_scales(p) + at,
                v_scales(p) + at};
    }
    return true;
  }
};

struct BlockTable {
  const int32_t* data;
  int64_t stride;
  const int32_t* row(int request) const { return data + request * stride; }
};

// Memory that is kept from call to call and layer to layer, and counted.
std::atomic<int64_t> workspace_bytes{0};

template <class T>
class Workspace {
 public:
  ~Workspace() { workspace_bytes -= capacity_ * int64_t(sizeof(T)); }
  T* get(size_t n) {
    if (n > capacity_) {
      memory_.reset(static_cast<T*>(operator new(n * sizeof(T), std::align_val_t(64))));
      workspace_bytes += int64_t(n - capacity_) * int64_t(sizeof(T));
      capacity_ = n;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<T, Free> memory_;
  size_t capacity_ = 0;
};

// Query rows of one attend call and their state, one a thread.
struct RowScratch {
  Workspace<int8_t> q;
  Workspace<float> floats;
  Workspace<int> limit;
  float* loaded;

  Rows rows(int count, int head_dim) {
    const int stride = round_up(head_dim, kOutAlign);
    float* f = floats.get(size_t(count) * (stride + 3) + head_dim + kOutAlign);
    Rows r;
    r.count = count;
    r.head_dim = head_dim;
    r.out_stride = stride;
    r.out = f;
    r.peak = f + size_t(count) * stride;
    r.total = r.peak + count;
    r.q_scale = r.total + count;
    loaded = r.q_scale + count;
    r.q = q.get(size_t(count) * head_dim);
    r.limit = limit.get(count);
    std::fill_n(r.peak, count, -INFINITY);
    std::fill_n(r.total, count, 0.0f);
    std::fill_n(r.out, size_t(count) * stride, 0.0f);
    return r;
  }

  void quantise(const TileOps& ops, const Rows& r, int row, const Tensor& query, int64_t token,
                int head, float score_scale) {
    ops.quantise(query.read(token, head, r.head_dim, loaded), r.head_dim, r.q + row * r.head_dim,
                 r.q_scale + row);
    r.q_scale[row] *= score_scale;
  }
};

// The same for float32 rows.
struct FloatScratch {
  Workspace<float> floats;
  Workspace<int> limits;
  float* q;
  int* limit;

  FloatRows rows(int count, int head_dim, int stride, float q_scale) {
    float* f = floats.get(size_t(count) * (stride + 2 + head_dim));
    limit = limits.get(count);
    FloatRows r;
    r.count = count;
    r.head_dim = head_dim;
    r.out_stride = stride;
    r.q_scale = q_scale;
    r.out = f;
    r.peak = f + size_t(count) * stride;
    r.total = r.peak + count;
    r.q = q = r.total + count;
    r.limit = limit;
    std::fill_n(r.out, size_t(count) * stride, 0.0f);
    std::fill_n(r.peak, count, -INFINITY);
    std::fill_n(r.total, count, 0.0f);
    return r;
  }
};

thread_local RowScratch row_scratch;
thread_local FloatScratch float_scratch;
thread_local Workspace<float> packed_workspace;  // the calling thread's: first_chunk's K and V
thread_local Workspace<float> partial_workspace;  // the calling thread's: decode's partitions

// Partials of one row, `step` floats apart: D sums normalised in their partition, then the log2 of
// the partition's sum of exp2(score). Merges n of them into merged[D], not yet divided by the
// returned sum of shares.
float merge(const float* partial, int64_t step, int n, int head_dim, float* merged) {
  float top = -INFINITY, total = 0;
  std::fill_n(merged, head_dim, 0.0f);
  for (int p = 0; p < n; ++p) top = std::max(top, partial[p * step + head_dim]);
  for (int p = 0; p < n; ++p) {
    const float share = exp2f(partial[p * step + head_dim] - top);
    total += share;
    for (int d = 0; d < head_dim; ++d) merged[d] += share * partial[p * step + d];
  }
  return total;
}

void normalise(const float* out, float peak, float total, int head_dim, float* partial) {
  for (int d = 0; d < head_dim; ++d) partial[d] = out[d] / total;
  partial[head_dim] = peak + log2f(total);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* kp_source_hash() { return KP_SOURCE_HASH; }
int kp_n_sets() { return int(sets().size()); }
const char* kp_set_name(int set) { return sets()[set].ops->name; }
int kp_set_supported(int set) { return sets()[set].supported; }
int64_t kp_workspace_bytes() { return workspace_bytes; }
int kp_max_threads() { return omp_get_max_threads(); }

int kp_write_kv(int set, void* key, int64_t key_token_stride, int64_t key_head_stride, void* value,
                int64_t value_token_stride, int64_t value_head_stride, int type, int8_t* cache_data,
                int64_t n_blocks, int64_t block_stride, int64_t head_stride, int block_size,
                int n_kv_heads, int head_dim, const int64_t* slots, int64_t n_tokens) {
  const TileOps& ops = *sets()[set].ops;
  const Tensor k{key, type, key_token_stride, key_head_stride};
  const Tensor v{value, type, value_token_stride, value_head_stride};
  const Cache cache{cache_data, n_blocks, block_stride, head_stride, block_size, head_dim};
  const int64_t n_slots = n_blocks * block_size;
  for (int64_t t = 0; t < n_tokens; ++t)
    if (slots[t] >= n_slots) return kSlotOutOfRange;
  const int64_t strides = (n_tokens + kStrideTokens - 1) / kStrideTokens;
#pragma omp parallel for collapse(2) schedule(static) if (n_tokens > 8)
  for (int64_t s = 0; s < strides; ++s) {
    for (int head = 0; head < n_kv_heads; ++head) {
      float scratch[kMaxHeadDim];
      int8_t row[kMaxHeadDim];
      for (int64_t t = s * kStrideTokens; t < std::min(n_tokens, (s + 1) * kStrideTokens); ++t) {
        if (slots[t] < 0) continue;
        int8_t* page = cache.page(slots[t] / block_size, head);
        const int at = int(slots[t] % block_size);
        ops.quantise(k.read(t, head, head_dim, scratch), head_dim, row, cache.k_scales(page) + at);
        int8_t* to = page + at / 16 * 16 * head_dim + at % 16 * 4;
        for (int d = 0; d < head_dim; d += 4) memcpy(to + d * 16, row + d, 4);
        ops.quantise(v.read(t, head, head_dim, scratch), head_dim, row, cache.v_scales(page) + at);
        to = page + block_size * head_dim + at / 4 * 4 * head_dim + at % 4;
        for (int d = 0; d < head_dim; ++d) to[d * 4] = row[d];
      }
    }
  }
  return kOk;
}

int kp_decode(int set, void* query, int64_t query_token_stride, int64_t query_head_stride,
              int query_type, int8_t* cache_data, int64_t n_blocks, int64_t block_stride,
              int64_t head_stride, int block_size, int n_kv_heads, int head_dim,
              const int32_t* block_table, int64_t table_stride, const int32_t* seq_lens,
              int n_requests, int n_heads, float sm_scale, int group, void* out,
              int64_t out_token_stride, int64_t out_head_stride, int out_type) {
  const TileOps& ops = *sets()[set].ops;
  const Tensor q{query, query_type, query_token_stride, query_head_stride};
  const Tensor o{out, out_type, out_token_stride, out_head_stride};
  const Cache cache{cache_data, n_blocks, block_stride, head_stride, block_size, head_dim};
  const BlockTable table{block_table, table_stride};
  const int n_shared = n_heads / n_kv_heads;

  // Partitions of one request and KV head are neighbours; whoever finishes the last of them merges
  // them. (A second parallel loop would cost a second barrier, and a barrier costs whole scheduler
  // ticks where other processes want the cores.)
  struct Item { int request, head, partition; int64_t first; int* left; };
  static thread_local std::vector<Item> items;
  static thread_local std::vector<int> left;
  items.clear();
  left.assign(size_t(n_requests) * n_kv_heads, 0);
  const float zeros[kMaxHeadDim] = {};
  for (int n = 0; n < n_requests; ++n) {
    const int n_partitions = ceil_div(seq_lens[n], kPartitionTokens);
    for (int head = 0; head < n_kv_heads; ++head) {
      const int64_t first = int64_t(items.size());
      int* counter = &left[size_t(n) * n_kv_heads + head];
      *counter = n_partitions;
      for (int p = 0; p < n_partitions; ++p) items.push_back({n, head, p, first, counter});
    }
    for (int head = 0; n_partitions == 0 && head < n_heads; ++head)
      o.write(n, head, head_dim, zeros, 1.0f);
  }
  const int stride = head_dim + 1;  // of a partial row
  const int64_t n_items = int64_t(items.size());
  float* partials = partial_workspace.get(size_t(n_items) * n_shared * stride);
  const Item* item_list = items.data();  // the vectors are the calling thread's own
  std::atomic<int> status{kOk};

#pragma omp parallel for schedule(dynamic) if (n_items > 4)  // waking threads costs 20 us
  for (int64_t i = 0; i < n_items; ++i) {
    const Item item = item_list[i];
    const int begin = item.partition * kPartitionTokens;
    const int end = std::min(seq_lens[item.request], begin + kPartitionTokens);
    Granule granules[kTileTokens / kGranuleTokens];
    if (!cache.granules(table.row(item.request), item.head, begin, end, granules)) {
      status = kBlockOutOfRange;
      continue;
    }
    const Rows rows = row_scratch.rows(n_shared, head_dim);
    for (int r = 0; r < n_shared; ++r) {
      row_scratch.quantise(ops, rows, r, q, item.request, item.head * n_shared + r,
                           sm_scale * kLog2E);
      rows.limit[r] = end - begin;
    }
    ops.attend(granules, group, rows);
    for (int r = 0; r < n_shared; ++r)
      normalise(rows.out + r * rows.out_stride, rows.peak[r], rows.total[r], head_dim,
                partials + (i * n_shared + r) * stride);
    if (__atomic_sub_fetch(item.left, 1, __ATOMIC_ACQ_REL)) continue;
    const int n_partitions = ceil_div(seq_lens[item.request], kPartitionTokens);
    for (int r = 0; r < n_shared; ++r) {
      float merged[kMaxHeadDim];
      const float total = merge(partials + (item.first * n_shared + r) * stride,
                                int64_t(n_shared) * stride, n_partitions, head_dim, merged);
      o.write(item.request, item.head * n_shared + r, head_dim, merged, 1.0f / total);
    }
  }
  return status;
}

// A step in which every request decodes: its tokens are written, then attended. One call, because
// between a model's other layers a call through Python costs as much as 300 tokens of attention.
int kp_write_and_decode(int set, void* query, int64_t query_token_stride, int64_t query_head_stride,
                        int type, void* key, int64_t key_token_stride, int64_t key_head_stride,
                        void* value, int64_t value_token_stride, int64_t value_head_stride,
                        int8_t* cache_data, int64_t n_blocks, int64_t block_stride,
                        int64_t head_stride, int block_size, int n_kv_heads, int head_dim,
                        const int64_t* slots, int64_t n_tokens, const int32_t* block_table,
                        int64_t table_stride, const int32_t* seq_lens, int n_requests, int n_heads,
                        float sm_scale, int group, void* out, int64_t out_token_stride,
                        int64_t out_head_stride) {
  const int status = kp_write_kv(set, key, key_token_stride, key_head_stride, value,
                                 value_token_stride, value_head_stride, type, cache_data, n_blocks,
                                 block_stride, head_stride, block_size, n_kv_heads, head_dim, slots,
                                 n_tokens);
  if (status != kOk) return status;
  return kp_decode(set, query, query_token_stride, query_head_stride, type, cache_data, n_blocks,
                   block_stride, head_stride, block_size, n_kv_heads, head_dim, block_table,
                   table_stride, seq_lens, n_requests, n_heads, sm_scale, group, out,
                   out_token_stride, out_head_stride, type);
}

int kp_prefix(int set, void* query, int64_t query_token_stride, int64_t query_head_stride,
              int query_type, int8_t* cache_data, int64_t n_blocks, int64_t block_stride,
              int64_t head_stride, int block_size, int n_kv_heads, int head_dim,
              const int32_t* block_table, int64_t table_stride, const int32_t* query_start_loc,
              const int32_t* seq_lens, int n_requests, int n_heads, float sm_scale, int group,
              void* out, int64_t out_token_stride, int64_t out_head_stride, int out_type) {
  const TileOps& ops = *sets()[set].ops;
  const Tensor q{query, query_type, query_token_stride, query_head_stride};
  const Tensor o{out, out_type, out_token_stride, out_head_stride};
  const Cache cache{cache_data, n_blocks, block_stride, head_stride, block_size, head_dim};
  const BlockTable table{block_table, table_stride};
  const int n_shared = n_heads / n_kv_heads;

  const int64_t n_tokens = query_start_loc[n_requests] - query_start_loc[0];
  const int block_rows = choose_block_rows(n_tokens * n_heads);
  static thread_local std::vector<RowBlock> items;
  list_row_blocks(query_start_loc, n_requests, n_kv_heads, n_shared, block_rows, &items);
  const int64_t n_items = int64_t(items.size());
  const RowBlock* item_list = items.data();
  std::atomic<int> status{kOk};

#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < n_items; ++i) {
    const RowBlock item = item_list[i];
    const int first_token = query_start_loc[item.request];
    const int n_query = query_start_loc[item.request + 1] - first_token;
    const int history = seq_lens[item.request] - n_query;
    const int count = std::min(block_rows, n_query * n_shared - item.row);
    const Rows rows = row_scratch.rows(count, head_dim);
    for (int r = 0; r < count; ++r)
      row_scratch.quantise(ops, rows, r, q, first_token + (item.row + r) / n_shared,
                           item.head * n_shared + (item.row + r) % n_shared, sm_scale * kLog2E);
    const int end = history + (item.row + count - 1) / n_shared + 1;
    for (int begin = 0; begin < end; begin += kPrefixTileTokens) {
      const int n = std::min(kPrefixTileTokens, end - begin);
      Granule granules[kPrefixTileTokens / kGranuleTokens];
      if (!cache.granules(table.row(item.request), item.head, begin, begin + n, granules)) {
        status = kBlockOutOfRange;
        break;
      }
      for (int r = 0; r < count; ++r)
        rows.limit[r] =
            std::clamp(history + (item.row + r) / n_shared + 1 - begin, 0, n);
      ops.attend(granules, group, rows);
    }
    for (int r = 0; r < count; ++r)
      o.write(first_token + (item.row + r) / n_shared,
              item.head * n_shared + (item.row + r) % n_shared, head_dim,
              rows.out + r * rows.out_stride, 1.0f / rows.total[r]);
  }
  return status;
}

// Causal attention of each request's chunk over its own unquantised keys and values.
int kp_first_chunk(int set, void* query, int64_t query_token_stride, int64_t query_head_stride,
                   int query_type, void* key, int64_t key_token_stride, int64_t key_head_stride,
                   int key_type, void* value, int64_t value_token_stride,
                   int64_t value_head_stride, int value_type, const int32_t* query_start_loc,
                   int n_requests, int n_heads, int n_kv_heads, int head_dim, float sm_scale,
                   void* out, int64_t out_token_stride, int64_t out_head_stride, int out_type) {
  const TileOps& ops = *sets()[set].ops;
  const Tensor q{query, query_type, query_token_stride, query_head_stride};
  const Tensor k{key, key_type, key_token_stride, key_head_stride};
  const Tensor v{value, value_type, value_token_stride, value_head_stride};
  const Tensor o{out, out_type, out_token_stride, out_head_stride};
  const int n_shared = n_heads / n_kv_heads;
  const int stride = round_up(head_dim, kOutAlign);

  // Packed K and V of a head, requests one after another, each padded to whole granules.
  static thread_local std::vector<int> padded_start;
  struct Strip { int request, begin, head; };  // one granule of one head, to be packed
  static thread_local std::vector<Strip> strips;
  padded_start.assign(1, 0);
  strips.clear();
  for (int n = 0; n < n_requests; ++n) {
    const int n_tokens = query_start_loc[n + 1] - query_start_loc[n];
    padded_start.push_back(padded_start.back() + round_up(n_tokens, kGranuleTokens));
    for (int t = 0; t < n_tokens; t += kGranuleTokens)
      for (int head = 0; head < n_kv_heads; ++head) strips.push_back({n, t, head});
  }
  const int64_t padded_tokens = padded_start.back();
  float* packed_k = packed_workspace.get(size_t(padded_tokens) * n_kv_heads * (head_dim + stride));
  float* packed_v = packed_k + padded_tokens * n_kv_heads * head_dim;
  const int64_t all_tokens = query_start_loc[n_requests] - query_start_loc[0];
  const int block_rows = choose_block_rows(all_tokens * n_heads);
  static thread_local std::vector<RowBlock> items;
  list_row_blocks(query_start_loc, n_requests, n_kv_heads, n_shared, block_rows, &items);
  const int* starts = padded_start.data();  // the vectors are the calling thread's own
  const Strip* strip_list = strips.data();
  const RowBlock* item_list = items.data();
  const int64_t n_strips = int64_t(strips.size()), n_items = int64_t(items.size());

#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n_strips; ++i) {
      const Strip strip = strip_list[i];
      const int64_t at = strip.head * padded_tokens + starts[strip.request] + strip.begin;
      const int first = query_start_loc[strip.request] + strip.begin;
      for (int t = 0; t < kGranuleTokens; ++t) {
        const bool there = first + t < query_start_loc[strip.request + 1];
        float scratch[kMaxHeadDim] = {};
        const float* row = there ? k.read(first + t, strip.head, head_dim, scratch) : scratch;
        float* to = packed_k + (at + t / 16 * 16) * head_dim + t % 16;
        for (int d = 0; d < head_dim; ++d) to[d * 16] = row[d];
        row = there ? v.read(first + t, strip.head, head_dim, scratch) : scratch;
        to = packed_v + (at + t) * stride;
        std::copy_n(row, head_dim, to);
        std::fill(to + head_dim, to + stride, 0.0f);
      }
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < n_items; ++i) {
      const RowBlock item = item_list[i];
      const int first_token = query_start_loc[item.request];
      const int n_query = query_start_loc[item.request + 1] - first_token;
      const int count = std::min(block_rows, n_query * n_shared - item.row);
      const int64_t at = item.head * padded_tokens + starts[item.request];
      const FloatRows rows = float_scratch.rows(count, head_dim, stride, sm_scale * kLog2E);
      for (int r = 0; r < count; ++r) {
        float scratch[kMaxHeadDim];
        std::copy_n(q.read(first_token + (item.row + r) / n_shared,
                           item.head * n_shared + (item.row + r) % n_shared, head_dim, scratch),
                    head_dim, float_scratch.q + r * head_dim);
      }
      const int end = (item.row + count - 1) / n_shared + 1;
      for (int begin = 0; begin < end; begin += kPrefixTileTokens) {
        const int n = std::min(kPrefixTileTokens, end - begin);
        for (int r = 0; r < count; ++r)
          float_scratch.limit[r] = std::clamp((item.row + r) / n_shared + 1 - begin, 0, n);
        ops.attend_float({packed_k + (at + begin) * head_dim, packed_v + (at + begin) * stride},
                         rows);
      }
      for (int r = 0; r < count; ++r)
        o.write(first_token + (item.row + r) / n_shared,
                item.head * n_shared + (item.row + r) % n_shared, head_dim,
                rows.out + r * rows.out_stride, 1.0f / rows.total[r]);
    }
  }
  return kOk;
}

// Decode of one token over unpaged, row-major INT8 K and V [heads][n_tokens][D]; q and out [heads][D]
// float32, scales [heads][n_tokens].
int kp_solve(int set, const float* q, const int8_t* k, const int8_t* v, const float* k_scale,
             const float* v_scale, float* out, int n_heads, int n_tokens, int head_dim,
             float sm_scale) {
  const TileOps& ops = *sets()[set].ops;
  const int n_partitions = ceil_div(n_tokens, kPartitionTokens);
  const int stride = head_dim + 1;
  float* partials = partial_workspace.get(size_t(n_heads) * n_partitions * stride);
#pragma omp parallel
  {
#pragma omp for collapse(2) schedule(static)
    for (int head = 0; head < n_heads; ++head) {
      for (int p = 0; p < n_partitions; ++p) {
        const int64_t first = int64_t(head) * n_tokens + p * kPartitionTokens;
        const int n = std::min(kPartitionTokens, n_tokens - p * kPartitionTokens);
        float peak, total, sums[kMaxHeadDim];
        ops.attend_plain(q + head * head_dim, sm_scale * kLog2E, k + first * head_dim,
                         v + first * head_dim, k_scale + first, v_scale + first, n, head_dim,
                         &peak, &total, sums);
        normalise(sums, peak, total, head_dim, partials + (head * n_partitions + p) * stride);
      }
    }
#pragma omp for schedule(static)
    for (int head = 0; head < n_heads; ++head) {
      float merged[kMaxHeadDim];
      const float total =
          merge(partials + head * n_partitions * stride, stride, n_partitions, head_dim, merged);
      for (int d = 0; d < head_dim; ++d) out[head * head_dim + d] = merged[d] / total;
    }
  }
  return kOk;
}

}  // extern "C"
#pragma GCC visibility pop
