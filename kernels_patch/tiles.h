// What the attention kernels do to one tile of tokens, as a table of functions for each instruction
// set. tiles.cpp is compiled once for each set; native.cpp, which knows pages, requests and threads,
// picks a table at run time. Nothing here knows where a tile came from.
#pragma once

#include <stdint.h>

constexpr int kGranuleTokens = 32;  // pages are read in granules; groups of W are multiples of it
constexpr int kTileTokens = 256;    // most tokens of one attend call (a decode partition)
constexpr int kMaxHeadDim = 256;
constexpr int kOutAlign = 32;       // rows of Rows::out are padded to this many floats

// 32 tokens of one KV head as layout.py arranges them.
struct Granule {
  const int8_t* k;       // [2][D / 4][16 tokens][4 dimensions]
  const int8_t* v;       // [8][D][4 tokens]
  const float* k_scale;  // [32]
  const float* v_scale;  // [32]
};

// Query rows that share a KV head, and the state of their online softmax.
struct Rows {
  int count;
  int head_dim;
  int out_stride;  // floats from one row of out to the next, a multiple of kOutAlign
  int8_t* q;       // [count][D]
  float* q_scale;  // [count] sQ * sm_scale * log2(e)
  int* limit;      // [count] tokens of this tile that the row may see, 0 to kTileTokens
  float* peak;     // [count] running maximum of the scores, in units of log2
  float* total;    // [count] sum of exp2(score - peak)
  float* out;      // [count][out_stride] sum of exp2(score - peak) * V
};

// The same without quantisation: float32 keys and values of one KV head, packed for the kernels.
struct FloatTile {
  const float* k;  // [n / 16][D][16 tokens], n rounded up to a granule
  const float* v;  // [n][out_stride], zeros beyond D
};

struct FloatRows {
  int count;
  int head_dim;
  int out_stride;   // of out and of FloatTile::v, a multiple of kOutAlign
  float q_scale;    // sm_scale * log2(e)
  const float* q;   // [count][D]
  const int* limit; // as in Rows
  float* peak;
  float* total;
  float* out;
};

struct TileOps {
  const char* name;
  // One online-softmax step over granules[0 .. limit / 32]; W is quantised for each `group` tokens.
  // A group's integers do not depend on the common factor of its weights, so the same step serves
  // prefix (unnormalised) and decode (one partition, divided by its total afterwards).
  void (*attend)(const Granule* granules, int group, const Rows& rows);
  // The step over float32 keys and values.
  void (*attend_float)(const FloatTile& tile, const FloatRows& rows);
  // q = clamp(round_half_even(x / scale), -127, 127), scale = amax / 127; NaN and infinity in x
  // give a scale that is one, so that they reach the output.
  void (*quantise)(const float* x, int n, int8_t* q, float* scale);
  // Unquantised query over row-major INT8 K and V [n_tokens][D]: one partition, as attend.
  void (*attend_plain)(const float* q, float q_scale, const int8_t* k, const int8_t* v,
                       const float* k_scale, const float* v_scale, int n_tokens, int head_dim,
                       float* peak, float* total, float* out);
};

extern "C" const TileOps kp_tiles_portable;
#if defined(__x86_64__)
extern "C" const TileOps kp_tiles_avx2;
extern "C" const TileOps kp_tiles_avx512;
#elif defined(__aarch64__)
extern "C" const TileOps kp_tiles_dotprod;
#endif
