// Are the 4-byte dot products of an instruction set exact? Compiled with that set's flags; compares
// every pair of bytes, and sums of many, with plain integers. Exit code 0, or 1 with the first error.
#define KP_TILES kp_tiles_dots
#define KP_TILES_NAME "dots"
#include "../../kernels_patch/tiles.cpp"

#include <stdio.h>

namespace {

typedef I (*Dot)(I acc, I a, I b);

I dot_as_key(I acc, I k, I q) { return dot_key(acc, as_key(k), q); }

// Lane i holds four bytes of a and b: (x, y) in place `at`, the extremes beside it.
bool agrees(const char* name, Dot dot, bool offset, int x, int y, int at, int low) {
  int8_t a[4 * L], b[4 * L];
  int32_t wanted[L], start[L];
  for (int i = 0; i < L; ++i) {
    for (int j = 0; j < 4; ++j) {
      a[4 * i + j] = int8_t(j == at ? x : i % 2 ? low : 127);
      b[4 * i + j] = int8_t(j == at ? y : i % 3 ? 127 : low < 0 ? -127 : 0);
    }
    start[i] = 1000 * i + (offset ? first_sum(b + 4 * i, 4) : 0);
    wanted[i] = 1000 * i;
    for (int j = 0; j < 4; ++j) wanted[i] += int32_t(a[4 * i + j]) * b[4 * i + j];
  }
  I acc;
  memcpy(&acc, start, sizeof acc);
  const I got = dot(acc, load(a), load(b));
  for (int i = 0; i < L; ++i) {
    if (got[i] == wanted[i]) continue;
    printf("%s: lane %d of %d * %d gives %d, not %d\n", name, i, x, y, int(got[i]), wanted[i]);
    return false;
  }
  return true;
}

}  // namespace

int main() {
  for (int at = 0; at < 4; ++at) {
    for (int x = -128; x < 128; ++x) {
      for (int y = -127; y < 128; ++y)  // a query is never -128
        if (!agrees("key", dot_as_key, true, x, y, at, -128)) return 1;
      for (int w = 0; w < 128; ++w)  // weights are 0 to 127 and stand first
        if (!agrees("weight", dot_weight, false, w, x, at, 0)) return 1;
    }
  }
}
